// What all charts have in common; both color schemes can read it.
const grid = "rgba(128,128,128,0.25)";
const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: grid };
// A finger that moves over a chart scrolls the page.
const touches = matchMedia("(pointer: coarse)").matches;
const common = {
  autosize: true,
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, sans-serif", size: 12, color: "#808080" },
  margin: { l: 44, r: 10, t: 26, b: 44 },
  hovermode: "closest",
  dragmode: touches ? false : "zoom",
  hoverlabel: { bgcolor: "#333", font: { color: "#fff" }, align: "left" },
  legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", traceorder: "normal" },
};
CHARTS.forEach((chart, number) => {
  const layout = { ...common, ...chart.layout, legend: { ...common.legend, ...chart.layout.legend } };
  for (const name of Object.keys(layout)) {
    if (/^[xy]axis/.test(name)) layout[name] = { ...axis, ...layout[name] };
  }
  const config = { responsive: true, displayModeBar: false };
  Plotly.newPlot(`chart-${number}`, chart.data, layout, config);
});
