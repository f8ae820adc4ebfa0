"""What `data=` takes, what it refuses, and how a run notices that a data set in memory has changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import elastic_ddp as ed
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data import map_style
from elastic_ddp.data.map_style import MapStyleIndex, check_data, index_in_memory
from elastic_ddp.driver.start_checks import check_identity, warn_about_data
from elastic_ddp.errors import ConfigError, DataError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import evaluation
from elastic_ddp.worker.job import COMMITS, Job
from tests.ranks import single_rank_group
from tests.single_rank_store import SingleRankStore


def train(run: Any) -> None: ...


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"name": "a", "storage": str(tmp_path), "steps": 1, "global_batch_size": 1, "micro_batch_size": 1}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (Stream(), "rows = list(dataset)\n    ElasticTrainer(train, data=rows"),
        ((row for row in range(3)), "of type generator"),
        ({1, 2}, "of type set"),
        (DataLoader(TensorDataset(torch.ones(3))), "data=loader.dataset, and collate_fn=loader.collate_fn"),
        ((np.ones(3), np.ones(3)), 'as a dict, such as {"x": x, "y": y}'),
    ],
    ids=["stream", "generator", "set", "loader", "tuple"],
)
def test_data_without_random_access_is_refused_with_the_fix(data: Any, fix: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ed.ElasticTrainer(train, data, config)
    assert fix in str(caught.value)


def test_arguments_that_do_not_apply_to_rows_are_refused(config: dict[str, Any]) -> None:
    rows = [{"x": 1}]
    with pytest.raises(ConfigError, match=r"transform maps columns .* type list, .* in collate_fn"):
        check_data(rows, transform=train)
    with pytest.raises(ConfigError, match=r"data\.columns=\['x'\] selects columns, but data is of type list"):
        check_data(rows, columns=["x"])
    check_data({"x": np.ones(3)}, transform=train, columns=["x"])
    for collate_fn, problem in [
        (7, "collate_fn=7 cannot be called with one argument"),
        (lambda: 0, "with one argument"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            ed.ElasticTrainer(train, rows, config, collate_fn=collate_fn)  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to workers: it holds .*lock"):
        ed.ElasticTrainer(train, rows, config, collate_fn=lambda rows: lock)


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> int:
        raise FileNotFoundError(f"no image {row}")


class Locked(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.ones(3))
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], r"data \(list\) has no rows"),
        ({}, "data has no columns"),
        ({"x": np.ones(0)}, r"data \(columns 'x'\) has no rows"),
        ({"x": np.ones(3), "y": np.ones(4)}, "differ in length: 'x' has 3, 'y' has 4 rows"),
        ({"x": 1.0}, r"data\['x'\] is a float and no array"),
        ({"train": TensorDataset(torch.ones(3))}, r"such as data\['train'\]"),
        ({"x": [[1], [1, 2]]}, r"data\['x'\] cannot become an array: .* collate_fn"),
        ({"x": torch.ones(3).bfloat16()}, r"data\['x'\] cannot become an array: .*BFloat16"),
        ({"x": torch.tensor(1.0)}, r"its shape is \(\)"),
        (pd.DataFrame({"x": [1, "a"]}), r"data frame cannot be read: .*one type"),
        (Broken(), r"data\[0\] raised FileNotFoundError\('no image 0'\):\n(.*\n)*.*in __getitem__"),
    ],
)
def test_unusable_data_in_memory_is_an_error_that_names_it(data: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        index_in_memory(data)


UNFIT_COLUMNS: dict[str, tuple[Any, str]] = {
    "strings": ({"x": np.ones(3), "text": ["a", "b", "c"]}, "column 'text' holds strings"),
    "table": (pa.table({"text": ["a", "b", "c"]}), "column 'text' holds strings.*in a transform or a collate_fn"),
    "list of strings": (pa.table({"words": [["a"], [], ["b"]]}), "column 'words' holds strings"),
    "nullable": (pd.DataFrame({"n": pd.array([1, None, 3], "Int64")}), "column 'n' .int64. has nulls.*Fill them"),
    "nulls in lists": (pa.table({"n": [[1], [None], [3]]}), "column 'n' .int64. has nulls"),
    "dates": (pd.DataFrame({"day": pd.to_datetime(["2024-01-01"] * 3)}), "'day' holds datetime64.* values"),
}


@pytest.mark.parametrize(("data", "problem"), UNFIT_COLUMNS.values(), ids=UNFIT_COLUMNS)
def test_columns_that_no_tensor_holds_are_found_before_ray_starts(
    data: Any, problem: str, config: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=problem):
        ed.ElasticTrainer(train, data, config).fit()
    if "nulls" not in problem:
        index_in_memory(data).check_columns(is_converted=True)


class Stored:
    """What `ship` returns, without Ray."""

    def __init__(self, parts: Any, name: str) -> None:
        self.parts = parts


def test_an_evaluation_reads_the_selected_columns_in_memory_and_refuses_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_style, "ship", Stored)
    generation: Any = SimpleNamespace(group=single_rank_group(), activity=Activity())
    config = SimpleNamespace(data=SimpleNamespace(columns=["x"]))
    job: Any = SimpleNamespace(config=config, storage=Storage(tmp_path), debugged=None)
    index = evaluation._share_index(generation, job, {"x": np.ones(3), "text": ["a", "b", "c"]}, False)
    assert isinstance(index, MapStyleIndex) and index.name == "columns 'x'"
    assert evaluation._share_index(generation, job, [{"x": 1}], False).num_rows == 1
    config.data.columns = None
    for texts in (["a good film", "a bad film"], ("a good film",)):
        with pytest.raises(DataError, match=r'^data is a list of strings, .* data=\{"text": texts\}, .*a good film'):
            evaluation._share_index(generation, job, texts, True)
    for path in ("a good film", Path("a good film")):
        with pytest.raises(DataError, match=r"^data='.*a good film' does not exist"):
            evaluation._share_index(generation, job, path, True)


def test_a_data_set_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data \(Locked\) cannot be sent .*lock.*\. Open files .* in __getitem__"):
        index_in_memory(Locked()).share()


def test_columns_are_selected() -> None:
    data = {"x": np.ones(3), "y": np.ones(3)}
    assert index_in_memory(data, ["y"]).name == "columns 'y'"
    with pytest.raises(DataError, match=r"data\.columns names 'z', but data has no such column\. Choose from x, y"):
        index_in_memory(data, ["z"])


class Augmented(Dataset[Any]):
    def __init__(self, rows: Any, draw: Any = lambda: 0.0) -> None:
        self.rows, self.draw = rows, draw

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return {"x": self.rows[row], "noise": self.draw()}


ROWS = np.arange(24.0).reshape(12, 2)
CHANGED = np.where(ROWS == 23, 99, ROWS)
ENTROPY = random.SystemRandom()


@pytest.mark.parametrize(
    ("data", "same", "changed"),
    [
        ({"x": ROWS}, {"x": ROWS.copy()}, {"x": CHANGED}),
        ({"x": ROWS}, {"x": np.asfortranarray(ROWS)}, {"x": ROWS.astype(np.float32)}),
        ({"x": torch.tensor(ROWS)}, {"x": torch.tensor(ROWS)}, {"y": torch.tensor(ROWS)}),
        ({"t": np.array(["a", "b"], object)}, {"t": np.array(["a", "b"], object)}, {"t": np.array(["a", "c"], object)}),
        (pa.table({"x": ROWS[:, 0]}), pa.table({"x": ROWS[:, 0]}), pa.table({"x": CHANGED[:, 1]})),
        (list(ROWS), list(ROWS.copy()), list(CHANGED)),
        (list(ROWS), list(ROWS), list(ROWS)[:-1]),
        ([{"t": "a", "n": None}], [{"t": "a", "n": None}], [{"t": "b", "n": None}]),
        (Augmented(torch.tensor(ROWS)), Augmented(torch.tensor(ROWS)), Augmented(torch.tensor(CHANGED))),
        (Augmented(ROWS, random.random), Augmented(ROWS, random.random), Augmented(CHANGED, random.random)),
        (Augmented(ROWS, ENTROPY.random), Augmented(ROWS, ENTROPY.random), Augmented(ROWS[:-1], ENTROPY.random)),
    ],
)
def test_a_changed_data_set_in_memory_has_another_fingerprint(data: Any, same: Any, changed: Any) -> None:
    fingerprint = index_in_memory(data).fingerprint
    assert index_in_memory(same).fingerprint == fingerprint
    assert index_in_memory(changed).fingerprint != fingerprint


def test_probing_rows_leaves_the_global_generators_alone() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    expected = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    index_in_memory(Augmented(ROWS, lambda: random.random() + np.random.random() + torch.rand(()).item()))
    assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == expected


def test_a_run_with_commits_refuses_another_data_set_in_memory(tmp_path: Path, config: dict[str, Any]) -> None:

    def job(rows: np.ndarray) -> Job:
        index = index_in_memory({"x": rows})
        return Job(
            config=RunConfig(**config), train=train, index=index, transform=None, storage=Storage(tmp_path / "a")
        )

    check_identity(job(CHANGED))
    store = SingleRankStore(Storage(tmp_path / "a").at(COMMITS), keep=1)
    store.save({"user": {}}, step=1, record=job(ROWS).to_record())
    check_identity(job(ROWS.copy()))
    with pytest.raises(ConfigError, match=r"data was 12 rows of columns 'x' .* is 12 rows .*compared by content"):
        check_identity(job(CHANGED))


CLASS = """
class Rows:
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, row): return self.rows[row]

def rows_of(values):
    class Rows:
        def __len__(self): return len(values)
        def __getitem__(self, row): return values[row]
    return Rows()
"""


def defined_in(module: str) -> Any:
    """The class and the function of `CLASS`, as a program has them that runs or imports it under this name."""
    scope = {"__name__": module}
    exec(CLASS, scope)
    return SimpleNamespace(**scope)


def test_a_class_of_rows_may_run_as_a_script_be_imported_or_move_to_another_file() -> None:
    data = [defined_in(module).Rows(ROWS) for module in ("__main__", "job", "project.data.rows")]
    prints = {index_in_memory(each).fingerprint for each in [*data, defined_in("job").rows_of(ROWS)]}
    assert len(prints) == 1
    defined_in_other = [defined_in("job").Rows(CHANGED), defined_in("job").Rows(ROWS[:-1]), list(ROWS)]
    assert not prints & {index_in_memory(each).fingerprint for each in defined_in_other}


class OwnGenerator(Augmented):
    def __init__(self) -> None:
        super().__init__(ROWS, np.random.default_rng(0).random)


@pytest.mark.parametrize(("data", "varies"), [(OwnGenerator(), True), (Augmented(ROWS, random.random), False)])
def test_a_data_set_that_keeps_a_generator_gets_a_warning(data: Any, varies: bool, config: dict[str, Any]) -> None:
    notes: list[str] = []
    warn_about_data(index_in_memory(data), RunConfig(**config), notes.append)
    assert [note.startswith("data[0] differs between two reads with equal seeds") for note in notes] == [True] * varies
