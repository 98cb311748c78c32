"use strict";
const root = document.documentElement;
const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const system = matchMedia("(prefers-color-scheme: dark)");
const phone = matchMedia("(max-width: 519px)");
let chosen = null; // the theme chosen with the button, or null for the theme of the system
// The reader's choices for training curves, and the index of the chosen variant of other figures.
const curves = { x: "step", log: false, smoothing: 0, hidden: new Set() };
const variant = {};

// Returns the data and layout of the chosen variant of a figure. For training curves, the x axis,
// the smoothing and the runs are those that the reader has chosen.
function current(id) {
  const figure = figures[id];
  const shown = figure.variants[variant[id] || 0];
  const fixed = { uirevision: variant[id] || 0 };
  if (!figure.x_axes.step) return { data: shown.data, layout: { ...shown.layout, ...fixed } };
  const data = shown.data.filter((trace) => !curves.hidden.has(trace.run)).flatMap((trace) => {
    const curve = { ...trace, x: curves.x === "step" ? trace.x : trace.xs[curves.x] };
    if (!curves.smoothing || trace.mode !== "lines") return [curve];
    const raw = { uid: trace.uid + "raw", opacity: 0.3, showlegend: false, hoverinfo: "skip" };
    return [{ ...curve, ...raw, legendgroup: trace.uid },
      { ...curve, y: smoothed(trace.y), legendgroup: trace.uid }];
  });
  const { xaxis, yaxis } = shown.layout;
  const title = { text: figure.x_axes[curves.x] };
  const logarithmic = curves.log ? { type: "log", rangemode: "normal", ...logTicks(data) } : {};
  return { data, layout: { ...shown.layout, showlegend: shown.data.length > 1, uirevision: 0,
    xaxis: { ...xaxis, title, uirevision: curves.x },
    yaxis: { ...yaxis, ...logarithmic, uirevision: curves.log } } };
}

// Returns an exponential moving average, corrected for the initial value of 0.
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = curves.smoothing * mean + (1 - curves.smoothing) * value;
    weight = curves.smoothing * weight + 1 - curves.smoothing;
    return mean / weight;
  });
}

// Returns at most 9 ticks, so that labels do not overlap. Ticks are at 1, 2 and 5 times powers of
// ten. Over many decades, they are only at powers of ten. In a small range, they are equidistant.
function logTicks(data) {
  let low = Infinity, high = 0;
  for (const value of data.flatMap((trace) => trace.y)) {
    if (value > 0) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  if (low > high) return {};
  const powers = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++) powers.push(n);
  const inside = (ticks) => ticks.filter((tick) => tick >= 0.99 * low && tick <= 1.01 * high);
  let ticks = inside(powers.flatMap((n) => [1, 2, 5].map((factor) => Number(`${factor}e${n}`))));
  if (ticks.length > 9) {
    const every = Math.ceil(powers.length / 9);
    ticks = inside(powers.filter((n) => n % every === 0).map((n) => Number(`1e${n}`)));
  } else if (ticks.length < 3) {
    const power = 10 ** Math.floor(Math.log10((high - low) / 3 || low));
    const step = power * ([5, 2].find((factor) => factor * power <= (high - low) / 3) || 1);
    ticks = [];
    for (let n = Math.ceil(low / step); n * step <= high; n++) ticks.push(n * step);
  }
  return { tickmode: "array", tickvals: ticks, ticktext: ticks.map((tick) => String(+tick.toPrecision(6))) };
}

// Returns the data and layout of a figure with the colours of the theme and the given width.
function themed(figure, width) {
  const css = getComputedStyle(root);
  const [ink, soft, line, card, heat, cold] = ["ink", "soft", "line", "card", "heat", "cold"].map(
    (name) => css.getPropertyValue("--" + name).trim());
  const narrow = phone.matches;
  const layout = {
    height: 340,
    showlegend: figure.data.length > 1,
    ...figure.layout,
    autosize: false,
    width,
    dragmode: narrow ? false : "zoom",
    margin: { l: 10, r: narrow ? 10 : 24, t: 12, b: 10 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css.fontFamily || "system-ui, sans-serif", size: narrow ? 11 : 12.5, color: ink },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink }, namelength: -1 },
    legend: { orientation: "h", x: 0, y: 1.01, xanchor: "left", yanchor: "bottom",
      traceorder: "normal", font: { size: narrow ? 10.5 : 12 }, ...(figure.layout.legend || {}) },
  };
  // If the legend has several lines, increase the height, so that the bars do not become smaller.
  const names = figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
  const longest = 45 + 7 * Math.max(0, ...names.map((name) => (name || "").length));
  const lines = Math.ceil(names.length / Math.max(1, Math.floor((width - 80) / longest)));
  if (layout.showlegend && lines > 1) layout.height += 18 * lines;
  for (const name of ["xaxis", "yaxis"]) {
    const axis = figure.layout[name] || {};
    layout[name] = {
      automargin: true, gridcolor: line, zerolinecolor: line, linecolor: line, ...axis,
      tickfont: { color: soft, size: narrow ? 10.5 : 12 }, fixedrange: narrow,
      title: { ...(axis.title || {}), font: { color: soft, size: 12 }, standoff: 8 },
    };
  }
  if (narrow && layout.yaxis.type === "category") Object.assign(layout.yaxis, shortened(figure));
  const letter = narrow ? 6.5 : 7.5;
  const labels = layout.yaxis.type !== "category" ? [] :
    layout.yaxis.ticktext || figure.data.flatMap((trace) => trace.y);
  const left = letter * Math.max(6, ...labels.map((label) => label.length));
  Object.assign(layout.xaxis, spaced(layout.xaxis, width - left - 50, (text) => letter * text.length));
  Object.assign(layout.yaxis, spaced(layout.yaxis, layout.height - 110, () => 14));
  const data = figure.data.map((trace) => {
    const result = { ...trace };
    for (const name of ["error_x", "error_y"]) {
      if (trace[name]) result[name] = { type: "data", thickness: 1.3, ...trace[name], color: soft };
    }
    if (trace.marker && trace.marker.line) {
      result.marker = { ...trace.marker, line: { ...trace.marker.line, color: card } };
    }
    if (trace.type === "heatmap") {
      result.colorscale = [[0, cold], [1, heat]];
      result.colorbar = { ...trace.colorbar, outlinewidth: 0, tickfont: { color: soft } };
    }
    return result;
  });
  return [data, layout];
}

// Removes each label of a logarithmic axis that would overlap the previous label.
function spaced(axis, pixels, sizeOf) {
  if (axis.type !== "log" || !axis.ticktext || axis.tickvals.length < 2) return {};
  const [first, last] = [axis.tickvals[0], axis.tickvals[axis.tickvals.length - 1]].map(Math.log);
  let free = -Infinity;
  const ticktext = axis.ticktext.map((text, index) => {
    const middle = pixels * (Math.log(axis.tickvals[index]) - first) / (last - first);
    const half = sizeOf(text) / 2;
    if (middle - half < free) return "";
    free = middle + half + 6;
    return text;
  });
  return { ticktext };
}

// On a phone, long labels would leave no space for the plot. The table has the full labels.
function shortened(figure) {
  const names = [...new Set(figure.data.flatMap((trace) => trace.y))];
  const short = (name) => name.length > 20 ? name.slice(0, 19) + "…" : name;
  return { tickmode: "array", tickvals: names, ticktext: names.map(short) };
}

function draw(only = () => true) {
  for (const plot of plots.filter((plot) => only(plot.dataset.figure, plot))) {
    Plotly.react(plot, ...themed(current(plot.dataset.figure), plot.clientWidth), {
      displaylogo: false, displayModeBar: !phone.matches,
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    });
  }
}

// The attribute data-theme is always set. It selects the pictures and the colours of plots.
const button = document.getElementById("theme");
function setTheme(theme) {
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "light" : "dark";
  draw();
}
const currentTheme = () => chosen || (system.matches ? "dark" : "light");
button.addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  setTheme(chosen);
});
system.addEventListener("change", () => setTheme(currentTheme()));
phone.addEventListener("change", () => draw());
setTheme(currentTheme());
new ResizeObserver(() => draw(
  (id, plot) => plot.clientWidth && plot.clientWidth !== plot.layout.width)).observe(document.body);

// The controls of the section apply to all training curves. A figure with several variants has its
// own control.
let waiting = false;
document.querySelector(".controls")?.addEventListener("input", (event) => {
  const { name, value, checked } = event.target;
  if (name === "run") curves.hidden[checked ? "delete" : "add"](value);
  else curves[name] = name === "log" ? checked : name === "smoothing" ? Number(value) : value;
  if (waiting) return;
  waiting = true; // at most one drawing per frame
  requestAnimationFrame(() => {
    waiting = false;
    draw((id) => figures[id].x_axes.step);
  });
});
for (const select of document.querySelectorAll("select.variant")) {
  select.addEventListener("change", () => {
    variant[select.dataset.figure] = select.selectedIndex;
    draw((id) => id === select.dataset.figure);
  });
}

// A click on a column title sorts the rows by this column. A second click reverses the order.
const cell = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;
const words = new Intl.Collator(undefined, { numeric: true });
function compare(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return a !== "" && b !== "" && !isNaN(x) && !isNaN(y) ? x - y : words.compare(a, b);
}
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0];
    const rows = [...body.rows].sort((a, b) =>
      (down ? -1 : 1) * compare(cell(a, head.cellIndex), cell(b, head.cellIndex)));
    body.append(...rows);
  });
}

// The copied table has numbers with all digits. The numbers on the page are rounded.
for (const copy of document.querySelectorAll(".copy")) {
  copy.addEventListener("click", async () => {
    const table = copy.parentNode.querySelector("table");
    const text = [...table.rows].map((row) => [...row.cells].map(
      (cell) => cell.dataset.v ?? cell.textContent.trim()).join("\t")).join("\n");
    try {
      await navigator.clipboard.writeText(text);
    } catch { // the clipboard API is not allowed here
      const area = document.body.appendChild(document.createElement("textarea"));
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    copy.textContent = "copied";
    setTimeout(() => { copy.textContent = "copy"; }, 1500);
  });
}

// A printed page has the light theme, a fixed width and expanded tables.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not(.long):not([open])")];
  for (const details of opened) details.open = true;
  root.dataset.theme = "light";
  for (const plot of plots) {
    const [data, layout] = themed(current(plot.dataset.figure), 640);
    Plotly.react(plot, data, layout);
  }
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
  setTheme(currentTheme());
});
