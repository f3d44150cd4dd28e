"use strict";
(function () {
  const PRINT_WIDTH = 690;
  const plots = Array.from(document.querySelectorAll(".plot"));
  const narrow = () => window.innerWidth < 640;

  function colours(printing) {
    const style = getComputedStyle(document.documentElement);
    const pick = (name, printed) => (printing ? printed : style.getPropertyValue(name).trim());
    return { ink: pick("--ink", "#000000"), line: pick("--line", "#bbbbbb"), paper: pick("--paper", "#ffffff") };
  }

  // Colours of text, grid and hover labels, as flat attributes that a layout update takes.
  function dress(layout, printing) {
    const { ink, line, paper } = colours(printing);
    const update = {
      "font.color": ink, "font.family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif",
      "font.size": narrow() ? 11 : 12, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": line, "modebar.activecolor": ink,
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

  function draw(plot) {
    const chart = JSON.parse(document.getElementById(plot.id + "-data").textContent);
    put(chart.layout, dress(chart.layout, false));
    if (narrow()) {
      Object.assign(chart.layout.margin, { l: 44, r: 4 });
      // Titles along the axis take a tenth of a phone; a smaller one is still read.
      for (const name of Object.keys(chart.layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
        const title = chart.layout[name].title;
        if (title) title.font = { size: 10.5 };
      }
    }
    const small = narrow() || plot.closest(".grid");
    const options = { responsive: true, displaylogo: false, displayModeBar: !small,
                      modeBarButtons: [["toImage", "resetScale2d"]] };
    return Plotly.newPlot(plot, chart.data, chart.layout, options);
  }

  function again(printing) {
    for (const plot of plots) {
      const size = printing
        ? { autosize: false, width: plot.closest(".grid") ? PRINT_WIDTH / 2 - 20 : PRINT_WIDTH }
        : { autosize: true, width: null };
      Plotly.relayout(plot, Object.assign(dress(plot.layout, printing), size));
    }
  }

  Promise.all(plots.map(draw)).then(() => {
    // For whoever waits for the charts, and for a picture of the whole page.
    document.documentElement.dataset.height = String(document.documentElement.scrollHeight);
    document.documentElement.dataset.charts = String(plots.length);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again(false));
  window.addEventListener("beforeprint", () => again(true));
  window.addEventListener("afterprint", () => again(false));
})();
