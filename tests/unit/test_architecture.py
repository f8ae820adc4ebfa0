"""The shape of the package, read from the source: which folder may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.distributed.device_mesh

import elastic_ddp

PACKAGE = "elastic_ddp"
SOURCE = Path(elastic_ddp.__file__).parent

ORDER = [
    "cli",
    "report",
    "driver",
    "doctor",
    "worker",
    "data",
    "ray_internals",
    "rendezvous",
    "checkpoint",
    "loggers",
    "telemetry",
    "distributed",
    "storage",
    "tensors",
    "config",
    "torch_internals",
    "notices",
    "signals",
    "console",
    "seeding",
    "formatting",
    "errors",
]
"""Top to bottom. A folder imports from those after it only; imports for type annotations count too."""

MAY_IMPORT_RAY = {"cli", "doctor", "driver", "worker", "data", "ray_internals", "rendezvous"}

KNOWS_RAYS_INTERNALS = "elastic_ddp.ray_internals"
"""They change with every release of Ray, so one package has them all, and no other Ray than its own is shown to it."""

KNOWS_TORCHS_INTERNALS = "elastic_ddp.torch_internals"

WRITES_ONLY = {"ray.cloudpickle.register_pickle_by_value"}
BETWEEN_PROCESSES = "elastic_ddp.data.packing"
"""It reads what another process of the same run has sent through Ray, which unpickles such objects as well."""
RUNS_CODE_WHEN_IT_READS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "cPickle", "_pickle"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its full name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, in functions and for type annotations too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else f"{node.module}:{alias.name}"
        else:
            yield from imports(node)


def roots(tree: ast.AST) -> set[str]:
    """The top packages that a module imports from."""
    return {each.partition(":")[0].partition(".")[0] for each in imports(tree)}


def imported_modules(name: str) -> set[str]:
    """Modules of the package that this one imports."""
    found = {each.partition(":")[0] for each in imports(modules()[name])}
    return {each for each in found if each in modules() and each != name}


def folder(name: str) -> str:
    """The part of the package that a module belongs to: `data` for `elastic_ddp.data.feed`."""
    return name.split(".")[1]


INNER = [name for name in modules() if name != PACKAGE]


def test_imports_run_one_way() -> None:
    assert {folder(name) for name in INNER} == set(ORDER)
    for name in INNER:
        below = {folder(name), *ORDER[ORDER.index(folder(name)) + 1 :]}
        wrong = {other for other in imported_modules(name) if other == PACKAGE or folder(other) not in below}
        assert not wrong, f"{name} imports {sorted(wrong)}, which are above it"


def test_imports_make_no_circle() -> None:
    TopologicalSorter({name: imported_modules(name) for name in modules()}).prepare()  # raises CycleError


def test_what_starts_often_does_not_wait_for_torch() -> None:
    """A worker that joins waits for the processes that read its data, and a run for its controller and rendezvous."""
    starts_often = "cli.main data.work data.pipeline notices.watch ray_internals.drain"
    names = [f"{PACKAGE}.{name}" for name in f"{starts_often} ray_internals.torch_trainer rendezvous.actor".split()]
    program = f"import sys\nfor name in {names}:\n    __import__(name)\n    assert 'torch' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_driver_imports_ray_train_ray_data_and_dtensor_while_ray_starts() -> None:
    """They take a second, which the start of Ray would wait for otherwise."""
    names = {"ray.train", "ray.data", "torch.distributed.tensor", "torch.distributed.checkpoint"}
    program = f"import sys, {PACKAGE} as ed; ed.ElasticTrainer, ed.Run, ed.Step; print({names} & sys.modules.keys())"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "set()\n"


def test_the_package_has_the_names_that_it_says_and_no_others() -> None:
    assert dir(elastic_ddp) == sorted(elastic_ddp.__all__) == sorted(elastic_ddp._MODULES)
    for name in elastic_ddp.__all__:
        assert getattr(elastic_ddp, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = elastic_ddp.Trainer


def test_ray_is_known_to_few() -> None:
    knowing = {folder(name) for name in INNER if "ray" in roots(modules()[name])}
    assert knowing <= MAY_IMPORT_RAY


def dotted_names(tree: ast.AST) -> Iterator[str]:
    """What is imported, and every dotted expression such as `ray.train.get_context`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_private_modules_of_ray_are_touched_in_one_place() -> None:
    for name in INNER:
        private = {
            each
            for each in dotted_names(modules()[name])
            if each.split(".")[0] == "ray" and any(piece.startswith("_") for piece in each.split(".")[1:])
        }
        assert not private or f"{name}.".startswith(f"{KNOWS_RAYS_INTERNALS}."), f"{name} touches {sorted(private)}"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module imports, or reads from other objects than its own."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names = [ast.unparse(node.args[1]).strip("'")]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_private_names_of_torch_are_used_in_one_module() -> None:
    dist = torch.distributed
    owners = [torch, torch.utils, torch.Tensor(), torch.nn.Module(), torch.nn.modules.batchnorm]
    owners += [torch.optim.SGD([torch.zeros(1)]), dist.device_mesh.DeviceMesh, dist.ProcessGroup, dist.distributed_c10d]
    private = {name for owner in owners for name in dir(owner)} | {"_pg_registry", "_schedulers", "_metadata"}
    for name in modules().keys() - {KNOWS_TORCHS_INTERNALS}:
        assert not private.intersection(private_names(modules()[name])), name


def test_nothing_that_could_run_code_from_a_file_is_imported_or_called() -> None:
    exports = {f"{PACKAGE}.cli.export": {"torch.save"}, f"{PACKAGE}.worker.weight_files": {"torch.load"}}
    for name, tree in modules().items():
        names = set(dotted_names(tree)) - WRITES_ONLY
        if name == BETWEEN_PROCESSES:
            names = {each.replace("cloudpickle", "") for each in names}
        assert not {piece for each in names for piece in each.split(".")} & RUNS_CODE_WHEN_IT_READS, name
        found = {"torch.load", "torch.save", "torch.jit.load", "numpy.load", "np.load"} & names
        assert not found - exports.get(name, set()), name
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
        assert all("weights_only=True" in ast.unparse(call) for call in loads), name


def test_tests_reach_behind_a_run_or_a_step_in_one_file_alone() -> None:
    files = [*(SOURCE.parent / "tests").rglob("*.py"), *(SOURCE.parent / "benchmarks").rglob("*.py")]
    reaching = [file.name for file in files if re.search(r"\b(run\._loop|run\._state|step\._[a-z])", file.read_text())]
    assert reaching == ["inside_run.py"]


def test_nothing_large_is_kept_in_the_repository() -> None:
    """What an experiment left, for example."""
    listing = ["git", "ls-files", "-z"]
    try:
        names = subprocess.run(listing, cwd=SOURCE.parent, check=True, capture_output=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = [SOURCE.parent / name for name in names.split("\0") if name]
    assert [str(file) for file in files if file.is_file() and file.stat().st_size > 1 << 20] == []
