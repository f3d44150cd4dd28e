"use strict";
(function () {
  const PRINT_WIDTH = 690;
  const plots = Array.from(document.querySelectorAll(".plot"));
  const narrow = () => window.innerWidth < 640;

  const isDark = () => document.documentElement.dataset.theme === "dark";

  // Dark colours of the palette, which are hard to see on a dark page, and their replacements.
  const BRIGHTER = [
    [/#0072B2/gi, "#4DB1F0"], [/#009E73/gi, "#2FD0A0"], [/#D55E00/gi, "#FF8A4C"], [/#CC79A7/gi, "#EBA5CB"],
    [/#8A8A8A/gi, "#B9C0C7"], [/#56B4E9/gi, "#9ADCFF"], [/#E69F00/gi, "#FFBF40"],
    [/rgba\(0, 114, 178, /g, "rgba(77, 177, 240, "],
  ];
  const brighter = (text) => BRIGHTER.reduce((found, [dull, bright]) => found.replace(dull, bright), text);

  function colours(printing) {
    const style = getComputedStyle(document.documentElement);
    const pick = (name, printed) => (printing ? printed : style.getPropertyValue(name).trim());
    return { ink: pick("--ink", "#000000"), line: pick("--line", "#bbbbbb"), paper: pick("--paper", "#ffffff"),
             soft: pick("--soft", "#444444") };
  }

  // Colours of text, grid and hover labels, as flat attributes that a layout update takes.
  function dress(layout, printing) {
    const { ink, line, paper, soft } = colours(printing);
    const update = {
      "font.color": ink, "font.family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif",
      "font.size": narrow() ? 11 : 12, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": soft, "modebar.activecolor": ink,
      "hoverlabel.bgcolor": paper, "hoverlabel.bordercolor": line,
    };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      update[name + ".gridcolor"] = line;
      update[name + ".linecolor"] = line;
      update[name + ".tickcolor"] = line;
    }
    return update;
  }

  function put(layout, update) {
    for (const [path, value] of Object.entries(update)) {
      const keys = path.split(".");
      const last = keys.pop();
      keys.reduce((part, key) => (part[key] = part[key] || {}), layout)[last] = value;
    }
    return layout;
  }

  function draw(plot, printing) {
    const text = document.getElementById(plot.id + "-data").textContent;
    const chart = JSON.parse(isDark() && !printing ? brighter(text) : text);
    put(chart.layout, dress(chart.layout, printing));
    if (narrow()) {
      Object.assign(chart.layout.margin, { l: 44, r: 4 });
      // Titles along the axis take a tenth of a phone; a smaller one is still read.
      for (const name of Object.keys(chart.layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
        const title = chart.layout[name].title;
        if (title) title.font = { size: 10.5 };
      }
    }
    if (printing) {
      const width = plot.closest(".grid") ? PRINT_WIDTH / 2 - 20 : PRINT_WIDTH;
      Object.assign(chart.layout, { autosize: false, width: width });
    }
    const small = narrow() || plot.closest(".grid");
    const options = { responsive: true, displaylogo: false, displayModeBar: !small,
                      modeBarButtons: [["toImage", "resetScale2d"]] };
    return Plotly.react(plot, chart.data, chart.layout, options);
  }

  function again(printing) {
    return Promise.all(plots.map((plot) => draw(plot, printing)));
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
  }

  // A page opened from a file may have no storage; the choice then lasts as long as the page.
  function remembered() {
    try { return localStorage.getItem("tailguard-theme"); } catch { return null; }
  }

  function remember(name) {
    try { localStorage.setItem("tailguard-theme", name); } catch { /* see remembered */ }
  }

  function save(button) {
    const text = JSON.parse(document.getElementById(button.dataset.text).textContent);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = button.dataset.name;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(remembered() || (prefersDark.matches ? "dark" : "light"));
  again(false).then(() => {
    // Signals that the charts are drawn, and gives the height for a full screenshot.
    document.documentElement.dataset.height = String(document.documentElement.scrollHeight);
    document.documentElement.dataset.charts = String(plots.length);
  });
  prefersDark.addEventListener("change", (event) => {
    if (remembered()) return;
    setTheme(event.matches ? "dark" : "light");
    again(false);
  });
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    remember(document.documentElement.dataset.theme);
    again(false);
  });
  for (const button of document.querySelectorAll(".download")) button.addEventListener("click", () => save(button));
  window.addEventListener("beforeprint", () => again(true));
  window.addEventListener("afterprint", () => again(false));
})();
