"use strict";
const root = document.documentElement;
const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const system = matchMedia("(prefers-color-scheme: dark)");
const phone = matchMedia("(max-width: 519px)");
let chosen = null; // the theme chosen with the button, or null to follow the system

// Returns data and layout of a figure in the colours of the theme and for the width of the page.
function themed(figure) {
  const css = getComputedStyle(root);
  const [ink, soft, line, card, heat, cold] = ["ink", "soft", "line", "card", "heat", "cold"].map(
    (name) => css.getPropertyValue("--" + name).trim());
  const narrow = phone.matches;
  const layout = {
    height: 340,
    showlegend: figure.data.length > 1,
    ...figure.layout,
    autosize: true,
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
  // A legend of several lines makes the plot taller, not the bars smaller.
  const letters = figure.data.reduce((sum, trace) => sum + (trace.name || "").length + 7, 0);
  if (layout.showlegend && narrow) layout.height += 19 * Math.ceil(letters / 48);
  for (const name of ["xaxis", "yaxis"]) {
    const axis = figure.layout[name] || {};
    layout[name] = {
      automargin: true, gridcolor: line, zerolinecolor: line, linecolor: line, ...axis,
      tickfont: { color: soft, size: narrow ? 10.5 : 12 }, fixedrange: narrow,
      title: { ...(axis.title || {}), font: { color: soft, size: 12 }, standoff: 8 },
    };
  }
  if (narrow && layout.yaxis.type === "category") Object.assign(layout.yaxis, shortened(figure));
  const data = figure.data.map((trace) => {
    const result = { ...trace };
    for (const name of ["error_x", "error_y"]) {
      if (trace[name]) result[name] = { type: "data", thickness: 1.3, ...trace[name], color: soft };
    }
    if (trace.type === "heatmap") {
      result.colorscale = [[0, cold], [1, heat]];
      result.colorbar = { ...trace.colorbar, outlinewidth: 0, tickfont: { color: soft } };
    }
    return result;
  });
  return [data, layout];
}

// On a phone long labels would leave no space for the plot. The table has them in full.
function shortened(figure) {
  const names = [...new Set(figure.data.flatMap((trace) => trace.y))];
  const short = (name) => name.length > 20 ? name.slice(0, 19) + "…" : name;
  return { tickmode: "array", tickvals: names, ticktext: names.map(short) };
}

function draw() {
  for (const plot of plots) {
    Plotly.react(plot, ...themed(figures[plot.dataset.figure]), {
      responsive: true, displaylogo: false, displayModeBar: !phone.matches,
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    });
  }
}

// The theme attribute is always set. Pictures and plots use its colours.
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
phone.addEventListener("change", draw);
setTheme(currentTheme());

// Tables: a click on a column title sorts the rows by that column, a second click reverses them.
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

// Copied numbers have all digits, but the numbers on the page are rounded.
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

// A printed page has the light theme, a fixed width and open tables.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not(.long):not([open])")];
  for (const details of opened) details.open = true;
  root.dataset.theme = "light";
  for (const plot of plots) {
    const [data, layout] = themed(figures[plot.dataset.figure]);
    Plotly.react(plot, data, { ...layout, autosize: false, width: 640 });
  }
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
  setTheme(currentTheme());
});
