"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const names = data.conditions, visible = new Set(data.shown), options = { seeds: true, bands: true, smooth: false };
  const slots = new Map();
  const drawn = new Set();
  let plotly = null;

  // The policy of this page forbids style attributes in markup; the same through the object model is allowed.
  const setAttribute = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const unpack = (packed) => {
    if (packed.values) return packed.values;
    const view = new DataView(bytes(packed.b).buffer), size = view.byteLength / 2, values = new Array(size);
    const step = (packed.hi - packed.lo) / 65534;
    for (let i = 0; i < size; i++) {
      const code = view.getUint16(2 * i, true);
      values[i] = code === 65535 ? null : packed.lo + step * code;
    }
    packed.values = values;
    return values;
  };

  // The mean of the points around each one, a twentieth of all: noise of single steps goes, gaps stay.
  const smoothed = (values) => {
    const reach = Math.floor(values.length / 40);
    if (!options.smooth || reach < 1) return values;
    return values.map((value, at) => {
      if (value === null) return null;
      const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((one) => one !== null);
      return near.reduce((sum, one) => sum + one, 0) / near.length;
    });
  };

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const faded = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
  // plotly reads tags in texts; a name must never become one.
  const inert = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");

  const slotOf = (index) => {
    if (!slots.has(index)) {
      const taken = new Set([...slots].filter(([other]) => visible.has(other)).map(([, slot]) => slot));
      let slot = index === data.baseline ? 0 : 1;
      while (index !== data.baseline && taken.has(slot)) slot++;
      slots.set(index, slot);
    }
    return slots.get(index);
  };
  const styleOf = (index) => {
    const slot = slotOf(index);
    return {
      color: colour(`c${slot === 0 ? 0 : 1 + ((slot - 1) % 7)}`),
      dash: ["solid", "dash", "dot", "dashdot"][slot === 0 ? 0 : Math.floor((slot - 1) / 7) % 4],
    };
  };

  const layout = (more) => {
    const axis = {
      gridcolor: faded(colour("line"), 0.7), linecolor: colour("line"), zerolinecolor: colour("line"), tickfont: { size: 11.5 },
      automargin: true,
    };
    const base = {
      margin: { l: 52, r: 14, t: 10, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("ink") },
      showlegend: false, hovermode: "x unified", dragmode: "zoom",
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 },
        namelength: 40 },
    };
    return { ...base, ...more, xaxis: { ...axis, ...(more.xaxis || {}) }, yaxis: { ...axis, ...(more.yaxis || {}) } };
  };

  const band = (curve, x, color, alpha) => {
    const low = smoothed(unpack(curve.low)), high = smoothed(unpack(curve.high));
    const kept = x.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null);
    const trace = { x: kept.map((i) => x[i]), mode: "lines", line: { width: 0, color }, hoverinfo: "skip" };
    return [
      { ...trace, y: kept.map((i) => low[i]) },
      { ...trace, y: kept.map((i) => high[i]), fill: "tonexty", fillcolor: faded(color, alpha) },
    ];
  };

  const figures = {
    curves(figure) {
      const traces = [], share = figure.unit === "share";
      const chosen = [...visible].sort((a, b) => a - b).filter((i) => figure.curves[i]);
      for (const i of chosen) {
        const curve = figure.curves[i], { color } = styleOf(i);
        if (options.bands && curve.low) traces.push(...band(curve, figure.x, color, chosen.length > 3 ? 0.1 : 0.17));
        if (options.seeds && curve.seeds)
          for (const one of curve.seeds)
            traces.push({ x: figure.x, y: smoothed(unpack(one.y)), mode: "lines", hoverinfo: "skip", connectgaps: true,
              opacity: 0.45, line: { color, width: 0.8, dash: one.done ? "solid" : "dot" } });
      }
      for (const i of chosen) {
        const { color, dash } = styleOf(i);
        traces.push({ x: figure.x, y: smoothed(unpack(figure.curves[i].mean)), name: inert(names[i]), connectgaps: true,
          mode: figure.markers || figure.x.length === 1 ? "lines+markers" : "lines", marker: { size: 6, color },
          line: { color, width: 2.2, dash }, hovertemplate: share ? "%{y:.1%}" : "%{y:.4~g}" });
      }
      return [traces, layout({ xaxis: { title: { text: figure.x_title, font: { size: 11.5 } }, rangemode: "tozero", hoverformat: ".0f" },
        yaxis: share ? { tickformat: ".2~%" } : { range: figure.range || undefined, exponentformat: "e", minexponent: 4, separatethousands: true } })];
    },
    forest(figure) {
      const y = figure.labels.map((_, i) => i), known = (end) => end !== null;
      const colors = figure.verdicts.map((v) => colour({ better: "good", worse: "bad", same: "accent", open: "open" }[v]));
      const ends = [0, ...figure.values, ...figure.seeds.flat(), ...figure.low.filter(known), ...figure.high.filter(known)];
      const least = Math.min(...ends), most = Math.max(...ends), room = 0.07 * (most - least || 1);
      const said = (end, side) => (known(end) ? end.toPrecision(3) : `no ${side} limit`), annotations = [];
      const limits = (i) => `${said(figure.low[i], "lower")}, ${said(figure.high[i], "upper")}`;
      const traces = y.map((i) => ({ x: [figure.low[i] ?? least - room, figure.high[i] ?? most + room], y: [i, i], mode: "lines", hoverinfo: "skip",
        line: { color: colors[i], width: 2, dash: known(figure.low[i]) && known(figure.high[i]) ? "solid" : "dash" } }));
      // An interval without an end runs into the edge of the plot as an arrow.
      for (const i of y)
        for (const [end, at, ax] of [[figure.low[i], least - room, 16], [figure.high[i], most + room, -16]])
          if (!known(end)) annotations.push({ x: at, y: i, ax, ay: 0, showarrow: true, arrowhead: 2, arrowsize: 1.2, arrowwidth: 2, arrowcolor: colors[i], text: "" });
      traces.push({ x: figure.seeds.flat(), y: figure.seeds.flatMap((diffs, i) => diffs.map(() => i + 0.24)), mode: "markers", hoverinfo: "skip",
        marker: { color: figure.seeds.flatMap((diffs, i) => diffs.map(() => colors[i])), size: 5, opacity: 0.55 } });
      traces.push({ x: figure.values, y, mode: "markers", marker: { color: colors, size: 10 },
        text: figure.labels.map((l, i) => `${inert(l)}: ${figure.values[i].toPrecision(3)} [${limits(i)}]`),
        hovertemplate: "%{text}<extra></extra>" });
      return [traces, layout({ annotations, hovermode: "closest", height: Math.max(170, 80 + 38 * y.length),
        xaxis: { range: [least - room, most + room], title: { text: inert(figure.unit), font: { size: 11.5 } }, zeroline: true, zerolinewidth: 2, zerolinecolor: colour("soft") },
        yaxis: { tickvals: y, ticktext: figure.labels.map(inert), range: [-0.6, y.length - 0.4], showgrid: false, zeroline: false } })];
    },
    pair(figure) {
      const color = colour({ better: "good", worse: "bad", same: "accent", open: "open" }[figure.verdict]);
      const traces = figure.lines.map((line) => ({ x: [0, 1], y: line.y, mode: "lines+markers", line: { color, width: 1.2 }, marker: { size: 5, color }, opacity: 0.75,
        hovertemplate: `seed ${line.seed}: ${figure.share ? "%{y:.1f}%" : "%{y:.4~g}"}<extra></extra>` }));
      return [traces, layout({ hovermode: "closest", margin: { l: 40, r: 14, t: 8, b: 30 },
        xaxis: { range: [-0.35, 1.35], tickvals: [0, 1], ticktext: ["baseline", "condition"], showgrid: false, zeroline: false, tickangle: 0, fixedrange: true },
        yaxis: { range: figure.range, ticksuffix: figure.share ? "%" : "", zeroline: false, nticks: 5 } })];
    },
    bars(figure) {
      const share = figure.unit.startsWith("share"), labels = figure.labels.map(inert);
      const shades = { useful: "c1", trained: "c1", "all right": "c3", "all wrong": "c2", "all same": "c6", "no verdict": "c4",
        "not trained": "c0", sampling: "c1", scoring: "c6", training: "c3", other: "c0" };
      const traces = figure.parts.filter((part) => part.x.some((x) => x > 0)).map((part) => ({ type: "bar", orientation: "h", name: inert(part.name), x: part.x,
        y: labels.map((_, i) => i), text: labels, textposition: "none", marker: { color: colour(shades[part.name] || "c7") },
        hovertemplate: `%{text}<br>${inert(part.name)}: ${share ? "%{x:.1%}" : "%{x:.3~g} s"}<extra></extra>` }));
      return [traces, layout({ barmode: "stack", hovermode: "closest", showlegend: true, bargap: 0.35,
        height: Math.max(170, 110 + 30 * labels.length), legend: { orientation: "h", y: -0.24, yref: "paper", yanchor: "top", traceorder: "normal", font: { size: 11.5 } },
        xaxis: { tickformat: share ? ".0%" : "", title: share ? {} : { text: "seconds", standoff: 4, font: { size: 11.5 } } },
        yaxis: { autorange: "reversed", showgrid: false, zeroline: false, tickvals: labels.map((_, i) => i), ticktext: labels } })];
    },
    plugin(figure) {
      const x = [], y = [], traces = [], y_format = figure.share ? "%{y:.2%}" : "%{y:.4~g}";
      for (const line of figure.thin) { x.push(...figure.x, null); y.push(...line, null); }
      if (x.length) traces.push({ x, y, mode: "lines", hoverinfo: "skip", showlegend: false, opacity: 0.3, line: { color: colour("soft"), width: 0.8 } });
      figure.lines.forEach((line, i) => traces.push({ x: figure.x, y: line.y, name: inert(line.name), mode: figure.x.length > 40 ? "lines" : "lines+markers",
        line: { color: colour(["c1", "c3", "c2", "c4", "c5", "c6", "c7"][i % 7]), width: 2.4, dash: ["solid", "dash", "dot"][i % 3] }, hovertemplate: y_format }));
      const kinds = [...new Set(figure.kinds)].sort(), of = (kind, values) => kinds.length ? values.filter((_, i) => figure.kinds[i] === kind) : values;
      if (figure.points.length) (kinds.length ? kinds : [""]).forEach((kind, i) => traces.push({ x: of(kind, figure.x), y: of(kind, figure.points),
        text: of(kind, figure.labels).map(inert), name: inert(kind), mode: "markers", showlegend: kinds.length > 0,
        marker: { color: colour(["c1", "c2", "c3", "c4", "c5", "c6", "c7"][i % 7]), symbol: i % 8, size: 7 },
        hovertemplate: `%{text}<br>${inert(figure.y_title)} ${y_format}<extra></extra>` }));
      const shapes = [], dashed = { type: "line", line: { color: colour("soft"), width: 1, dash: "dash" } };
      if (figure.y_mark !== null) shapes.push({ ...dashed, xref: "paper", x0: 0, x1: 1, y0: figure.y_mark, y1: figure.y_mark });
      if (figure.x_mark !== null) shapes.push({ ...dashed, yref: "paper", y0: 0, y1: 1, x0: figure.x_mark, x1: figure.x_mark });
      const title = (text) => ({ text: inert(text), standoff: 4, font: { size: 11.5 } });
      return [traces, layout({ shapes, showlegend: figure.lines.length + kinds.length > 0, legend: { orientation: "h", y: -0.2, yanchor: "top" },
        hovermode: figure.points.length ? "closest" : "x unified",
        xaxis: { title: title(figure.x_title), ...(figure.log ? { type: "log", tickvals: figure.x } : {}) },
        yaxis: { title: title(figure.y_title), ...(figure.share ? { tickformat: ".0%" } : { rangemode: "tozero" }) } })];
    },
    // Traces and layout as plotly takes them, but with names of this page's colours.
    traces(figure) {
      const made = (value, key) => {
        if (typeof value === "string") return key === "color" ? colour(value) : key === "hovertemplate" ? value : inert(value);
        if (Array.isArray(value)) return value.map((one) => made(one, key));
        return value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([name, one]) => [name, made(one, name)])) : value;
      };
      return [made(figure.traces), layout({ hovermode: "closest", ...made(figure.layout) })];
    },
  };

  const draw = (place) => {
    const figure = data.figures[Number(place.dataset.figure)];
    const [traces, shape] = figures[figure.kind](figure);
    if (shape.height) place.style.height = `${shape.height}px`;
    plotly.react(place, traces, { ...shape, width: place.clientWidth, height: shape.height || place.clientHeight, autosize: false },
      { displayModeBar: false, doubleClick: "reset", showTips: false });
    drawn.add(place);
  };
  const places = [...document.querySelectorAll(".plot")];
  places.forEach((place, i) => { place.dataset.figure = i; }); // figures are in the order of the page
  const redraw = (kind) => {
    for (const place of drawn) if (!kind || data.figures[Number(place.dataset.figure)].kind === kind) draw(place);
  };

  const svg = "http://www.w3.org/2000/svg";
  const swatch = (index) => {
    const picture = document.createElementNS(svg, "svg"), line = document.createElementNS(svg, "line");
    const { color, dash } = styleOf(index), shape = { x1: 0, x2: 22, y1: 5, y2: 5, stroke: color, "stroke-width": 3 };
    if (dash !== "solid") shape["stroke-dasharray"] = { dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" }[dash];
    for (const [name, value] of Object.entries(shape)) line.setAttribute(name, value);
    picture.setAttribute("viewBox", "0 0 22 10");
    picture.setAttribute("aria-hidden", "true");
    picture.append(line);
    return picture;
  };
  const chips = [];
  const paintChips = () => chips.forEach((chip, index) => {
    chip.setAttribute("aria-pressed", String(visible.has(index)));
    chip.replaceChildren(...(visible.has(index) ? [swatch(index)] : []), document.createTextNode(names[index] + (index === data.baseline ? " (baseline)" : "")));
  });
  const toggle = (index) => {
    if (visible.has(index)) { visible.delete(index); if (!data.shown.includes(index)) slots.delete(index); }
    else visible.add(index);
    paintChips();
    redraw("curves");
  };
  const option = (name, label) => {
    const box = document.createElement("input"), text = document.createElement("label");
    box.type = "checkbox";
    box.checked = options[name];
    box.addEventListener("change", () => { options[name] = box.checked; redraw("curves"); });
    text.append(box, label);
    return text;
  };
  const curves = document.querySelector("#curves h3"), legend = document.createElement("div");
  legend.id = legend.className = "legend";
  if (curves) curves.before(legend);
  const buildLegend = () => {
    const several = data.figures.some((f) => f.kind === "curves" && Object.values(f.curves).some((c) => c.seeds));
    const shaded = data.figures.some((f) => f.kind === "curves" && Object.values(f.curves).some((c) => c.low));
    if (names.length > 1) {
      const list = document.createElement("div");
      list.className = "chosen";
      list.setAttribute("role", "group");
      list.setAttribute("aria-label", "Conditions drawn");
      names.forEach((_, index) => {
        const chip = document.createElement("button");
        chip.type = "button";
        chip.addEventListener("click", () => toggle(index));
        chips.push(chip);
      });
      const order = [...chips.keys()].sort((a, b) => visible.has(b) - visible.has(a) || a - b);
      list.append(...order.map((index) => chips[index]));
      paintChips();
      if (names.length > 12) {
        const search = document.createElement("input");
        search.type = "search";
        search.placeholder = `Find one of ${names.length} conditions`;
        search.setAttribute("aria-label", search.placeholder);
        search.addEventListener("input", () => chips.forEach((chip, index) => {
          chip.hidden = !names[index].toLowerCase().includes(search.value.toLowerCase());
        }));
        legend.append(search);
      }
      legend.append(list);
    }
    if (shaded) legend.append(option("bands", "shade"));
    if (several) legend.append(option("seeds", "single seeds"));
    if (data.figures.some((f) => f.kind === "curves" && f.x.length >= 40)) legend.append(option("smooth", "smooth"));
  };

  document.addEventListener("retheme", () => { if (plotly) { redraw(); paintChips(); } });

  const MOST_SEED_LINES = 16;
  const start = async () => {
    data.shown.forEach(slotOf);
    const first = data.figures.find((f) => f.kind === "curves");
    const lines = first ? data.shown.reduce((sum, i) => sum + ((first.curves[i] || {}).seeds || []).length, 0) : 0;
    options.seeds = lines <= MOST_SEED_LINES;
    if (curves) buildLegend();
    const stream = new Blob([bytes(document.getElementById("plotly").textContent)]).stream();
    const script = document.createElement("script");
    script.textContent = await new Response(stream.pipeThrough(new DecompressionStream("deflate"))).text();
    document.head.append(script);
    plotly = window.Plotly || window.moduleName;
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
    }, { rootMargin: "500px" });
    places.forEach((place) => watcher.observe(place));
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
    addEventListener("beforeprint", () => {
      root.dataset.theme = "light";
      places.forEach(draw);
      document.querySelectorAll("details.condition").forEach((fold) => { fold.open = true; });
    });
    root.dataset.plots = "ready";
  };
  start().catch((error) => {
    const trouble = document.getElementById("trouble");
    trouble.textContent = `The plots could not be drawn (${error.message}); every table is there. A current browser can draw them.`;
    trouble.hidden = false;
    root.dataset.plots = "failed";
  });
})();
