// A finger that moves over a chart scrolls the page.
const touches = matchMedia("(pointer: coarse)").matches;
CHARTS.forEach((chart, number) => {
  const layout = { ...chart.layout, dragmode: touches ? false : "zoom" };
  Plotly.newPlot(`chart-${number}`, chart.data, layout, { responsive: true, displayModeBar: false });
});
