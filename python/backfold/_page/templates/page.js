"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const FAMILIES = {
  "rounded": "--rounded", "exact, smaller": "--smaller", "made again": "--again",
  "kept for another": "--shared", "as it is": "--asitis", "alive anyway": "--alive",
};
const CONFIG = {responsive: true, displayModeBar: false, scrollZoom: false};
let shown = "before";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isNarrow = () => window.innerWidth < 640;
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function unitOf(most) {
  const power = most > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log(most) / Math.log(1024))) : 0;
  return {name: UNITS[power], bytes: 1024 ** power};
}

// As the tables write sizes.
function size(count) {
  if (count === 0) return "0";
  const unit = unitOf(Math.abs(count));
  const value = count / unit.bytes;
  const digits = unit.bytes === 1 || Math.abs(value) >= 1000 ? 0 : Math.abs(value) < 10 ? 2 : 1;
  return `${value.toFixed(digits)} ${unit.name}`;
}

function layout(more) {
  const axis = {
    gridcolor: color("--line"), linecolor: color("--line"), zeroline: false,
    tickfont: {size: 12}, tickcolor: color("--line"), ticks: "outside", automargin: true, fixedrange: true,
  };
  const {xaxis, yaxis, ...rest} = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: isNarrow() ? 12 : 13, color: color("--soft")},
    margin: {l: 8, r: 8, t: 8, b: 8},
    hoverlabel: {bgcolor: color("--card"), bordercolor: color("--line"), font: {color: color("--ink")}, align: "left"},
    legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: {color: color("--ink")}},
    dragmode: false,
    xaxis: {...axis, showgrid: false, ...xaxis}, yaxis: {...axis, ...yaxis},
    ...rest,
  };
}

// Levels of the tree that can be drawn at once; more appear where a part is opened.
function levelsThatFit(depths) {
  const most = isNarrow() ? 40 : 160;
  const deepest = Math.max(...depths) + 1;
  let levels = 2;
  while (levels < deepest && depths.filter((depth) => depth >= 1 && depth <= levels + 1).length <= most) ++levels;
  return levels;
}

function drawTree() {
  const tree = figures.tree;
  const areas = tree[shown];
  const keep = tree.id.map((_, i) => i).filter((i) => areas[i] > 0);
  const column = (values) => keep.map((i) => values[i]);
  const levels = levelsThatFit(column(tree.depth));
  // The deepest parts that are drawn have the colour of what most of them is.
  const isFrame = (i) => tree.depth[i] >= 1 && tree.depth[i] < levels;
  const colors = keep.map((i) => color(isFrame(i) ? "--frame" : FAMILIES[tree.family[i]]));
  Plotly.react("tree-chart", [{
    type: "treemap", branchvalues: "total", maxdepth: levels, sort: true,
    ids: column(tree.id), parents: column(tree.parent), labels: column(tree.name).map(escaped),
    values: column(areas),
    customdata: keep.map((i) => [
      size(tree.before[i]), size(tree.after[i]), tree.family[i], size(areas[i]),
    ]),
    texttemplate: "%{label}<br>%{customdata[3]}",
    hovertemplate: "<b>%{id}</b><br>autograd alone %{customdata[0]}<br>held %{customdata[1]}" +
      "<br>%{customdata[2]}<extra></extra>",
    marker: {colors, line: {width: 1.5, color: color("--card")}, pad: {t: 22, l: 3, r: 3, b: 3}},
    textfont: {size: isNarrow() ? 12 : 13}, pathbar: {thickness: 26, textfont: {color: color("--ink")}},
    root: {color: "rgba(0,0,0,0)"}, tiling: {pad: 2},
  }], layout({
    margin: {l: 0, r: 0, t: 30, b: 0}, uniformtext: {minsize: 10, mode: "hide"},
  }), CONFIG);
}

function drawTimeline() {
  const line = figures.timeline;
  if (!line) return;
  const folded = line.held.map((bytes, i) => bytes + line.made[i]);
  const unit = unitOf(Math.max(...line.plain, ...folded));
  const scaled = (values) => values.map((bytes) => bytes / unit.bytes);
  const events = line.plain.map((_, i) => i);
  const curve = (name, bytes, style) => ({
    type: "scatter", mode: "lines", name, x: events, y: scaled(bytes), text: line.place.map(escaped),
    customdata: bytes.map(size), hovertemplate: "%{text}<br>%{customdata}<extra>" + name + "</extra>", ...style,
  });
  const peakNote = (peak, label, place) => ({
    x: peak.event, y: peak.bytes / unit.bytes, text: `${label} <b>${size(peak.bytes)}</b><br>${escaped(place)}`,
    showarrow: true, arrowhead: 0, arrowcolor: color("--soft"), ax: 0, ay: -34, align: "center",
    font: {color: color("--ink"), size: isNarrow() ? 11 : 12}, bgcolor: color("--card"), opacity: 0.9,
    // Near an edge the note is turned inward.
    xanchor: peak.event < events.length * 0.25 ? "left" : peak.event > events.length * 0.75 ? "right" : "center",
  });
  const short = (place) => isNarrow() && place.length > 34 ? "…" + place.slice(-33) : place;
  const annotations = [peakNote(line.peak.plain, "peak", short(line.peak.plain.place))];
  if (line.peak.folded.bytes < 0.999 * line.peak.plain.bytes)
    annotations.push(peakNote(line.peak.folded, "peak", short(line.peak.folded.place)));
  const shapes = [];
  line.phases.forEach((phase, i) => {
    const until = i + 1 < line.phases.length ? line.phases[i + 1].from : events.length;
    if (i > 0) shapes.push({
      type: "line", x0: phase.from - 0.5, x1: phase.from - 0.5, y0: 0, y1: 1, yref: "paper",
      line: {color: color("--soft"), width: 1, dash: "dot"},
    });
    if (until - phase.from > events.length / 10) annotations.push({
      x: (phase.from + until) / 2, y: 0, yref: "paper", yanchor: "top", yshift: -6, showarrow: false, text: phase.phase,
    });
  });
  Plotly.react("timeline-chart", [
    curve("autograd alone", line.plain, {line: {color: color("--plain"), width: 2, shape: "hv"}}),
    curve("held and decoded", folded, {
      line: {color: color("--made"), width: 1, shape: "hv"}, fill: "tozeroy", fillcolor: color("--made"),
    }),
    curve("held", line.held, {
      line: {color: color("--held"), width: 1.5, shape: "hv"}, fill: "tozeroy", fillcolor: color("--held"),
    }),
  ], layout({
    annotations, shapes, hovermode: "x unified", margin: {l: 8, r: 8, t: 8, b: 28},
    xaxis: {showticklabels: false, ticks: "", range: [-0.5, events.length - 0.5]},
    yaxis: {title: {text: unit.name}, range: [0, 1.22 * Math.max(...scaled(line.plain), ...scaled(folded))]},
  }), CONFIG);
}

function drawBits() {
  const bits = figures.bits;
  if (!bits.bits.length) return;
  const most = Math.max(...bits.bytes, 1);
  Plotly.react("bits-chart", [{
    type: "scatter", mode: "markers", x: bits.sensitivity, y: bits.bits, text: bits.place.map(escaped),
    customdata: bits.bytes.map(size),
    hovertemplate: "%{text}<br>%{y} bits, %{customdata}<br>error of an element at 4 bits %{x:.2e}<extra></extra>",
    marker: {
      size: bits.bytes.map((bytes) => 7 + 19 * Math.sqrt(bytes / most)), color: color("--rounded"), opacity: 0.55,
      line: {color: color("--card"), width: 1},
    },
  }], layout({
    xaxis: {
      type: "log", exponentformat: "power", dtick: 1, showgrid: true,
      title: {text: isNarrow() ? "error energy of an element at 4 bits" : "sensitivity: error energy of an element at 4 bits"},
    },
    yaxis: {title: {text: "bits"}, dtick: 1, rangemode: "tozero"},
  }), CONFIG);
}

function drawNoise() {
  const noise = figures.noise;
  if (!document.getElementById("noise-chart")) return;
  const all = [...noise.noise, ...noise.plan_error].filter((value) => value > 0);
  const floor = Math.min(0.01, ...all), ceiling = Math.max(0.2, ...all);
  const last = Math.max(10, ...noise.step, ...noise.plan_step);
  const series = (name, x, y, style) => ({
    type: "scatter", name, x, y, hovertemplate: "step %{x}: %{y:.3g}<extra>" + name + "</extra>", ...style,
  });
  Plotly.react("noise-chart", [
    series("error / gradient variance", noise.step, noise.noise, {
      mode: "lines+markers", line: {color: color("--held"), width: 2}, marker: {size: 7},
    }),
    series("a plan's error / gradient energy", noise.plan_step, noise.plan_error, {
      mode: "markers", marker: {color: color("--asitis"), size: 9, symbol: "diamond"},
    }),
  ], layout({
    showlegend: true,
    shapes: [{type: "line", xref: "paper", x0: 0, x1: 1, y0: 0.1, y1: 0.1, line: {color: color("--soft"), width: 1, dash: "dot"}}],
    annotations: [{xref: "paper", x: 1, xanchor: "right", y: Math.log10(0.1), yanchor: "bottom", showarrow: false, text: "a tenth"}],
    xaxis: {title: {text: "step"}, range: [0, 1.04 * last]},
    yaxis: {type: "log", dtick: 1, exponentformat: "power", range: [Math.log10(floor) - 0.2, Math.log10(ceiling) + 0.2]},
  }), CONFIG);
}

function draw() {
  drawTree();
  drawTimeline();
  drawBits();
  drawNoise();
}

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    shown = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]"))
      other.setAttribute("aria-pressed", String(other === button));
    drawTree();
  });
}
for (const button of document.querySelectorAll(".expand")) {
  button.addEventListener("click", () => {
    document.getElementById(button.getAttribute("aria-controls")).classList.add("whole");
    button.remove();
  });
}

// The library is packed to keep the file small.
async function loadCharts() {
  const packed = Uint8Array.from(atob(document.getElementById("charts").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

loadCharts().then(() => {
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let narrow = isNarrow();
  window.addEventListener("resize", () => {
    if (isNarrow() !== narrow) { narrow = isNarrow(); draw(); }
  });
  document.documentElement.dataset.drawn = "true";
});
