"use strict";
(() => {
  const setup = JSON.parse(document.getElementById("page-setup").textContent);
  const root = document.documentElement, byId = (id) => document.getElementById(id);
  const LIVE = ["running", "stale"], SOON_MS = setup.every_ms, LATER_MS = 8 * SOON_MS, RECENT = 20, SVG = "http://www.w3.org/2000/svg";
  let rows = [], more = [], generation = 0, newest = null, pending = 0;

  // Everything that comes from the run is set as text, never as markup.
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const drawn = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const setText = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };
  const duration = (seconds) => {
    if (!Number.isFinite(seconds)) return "—";
    if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const brief = (value, digits) => value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(digits)).toString();
  const written = (value, unit) => {
    if (!Number.isFinite(value)) return "—";
    if (unit === "share") return `${(100 * value).toFixed(1)}%`;
    return unit === "seconds" ? duration(value) : brief(value, 4);
  };
  const last = (field) => { for (let i = rows.length - 1; i >= 0; i--) if (field in rows[i]) return rows[i]; return null; };

  // ---------------------------------------------------------------- the state of the run

  const share = (progress) => {
    const elapsed = progress.tokens / progress.tokens_per_s;
    if (elapsed > 0 && progress.time_left_s >= 0) return elapsed / (elapsed + progress.time_left_s);
    return progress.total > 0 ? Math.min(1, progress.done / progress.total) : null;
  };
  const stepsLeft = (status) => {
    const times = rows.slice(-RECENT).map((row) => row.step_time_s).filter(Number.isFinite).sort((a, b) => a - b);
    return times.length ? times[Math.floor(times.length / 2)] * Math.max(0, status.max_steps - status.step) : NaN;
  };
  const showStatus = (status) => {
    const gone = status.status === "gone", live = LIVE.includes(status.status);
    trouble(gone ? "The run's folder is gone: moved, renamed or removed. The data read so far stays here." : "");
    if (gone) { setText("state", "gone"); byId("state").className = "pill bad"; return false; }
    setText("state", status.status);
    byId("state").className = `pill ${live ? "live" : status.status === "done" ? "ended" : "bad"}`;
    setText("setup", [status.condition, status.model].filter(Boolean).join(" on ") + (status.error ? `: ${status.error}` : ""));
    const total = status.max_steps || 0, progress = status.progress || {}, part = live ? share(progress) : null;
    setText("run-text", `step ${status.step}/${total || "?"}`);
    byId("run-bar").value = total ? status.step / total : 0;
    setText("run-left", live ? `${duration(stepsLeft(status))} left` : `took ${duration(status.wall_time_s)}`);
    byId("phase-text").parentElement.hidden = !live;
    setText("phase-text", status.phase || "starting");
    if (part === null && live) byId("phase-bar").removeAttribute("value");
    else byId("phase-bar").value = part ?? 1;
    setText("phase-left", !live ? "" : progress.time_left_s >= 0 ? `${duration(progress.time_left_s)} left` : `for ${duration(status.phase_elapsed_s)}`);
    setText("phase-detail", !live || !progress.total ? "" : [`${progress.done}/${progress.total} ${progress.unit || ""}`,
      progress.tokens && `${progress.tokens.toLocaleString("en")} tokens`, progress.tokens_per_s && `${Math.round(progress.tokens_per_s).toLocaleString("en")} tokens/s`,
    ].filter(Boolean).join(", "));
    const evaluated = last("eval_correct_rate"), first = rows.find((row) => "eval_correct_rate" in row);
    const heldOut = evaluated && (first !== evaluated ? `${written(first.eval_correct_rate, "share")} → ` : "") + `${written(evaluated.eval_correct_rate, "share")} [${written(evaluated.eval_ci_low, "share")}, ${written(evaluated.eval_ci_high, "share")}]`;
    const facts = { "held out": heldOut, "correct, last step": written(status.correct_rate ?? NaN, "share"),
      "mean reward": written(status.mean_reward ?? NaN), loss: written(status.loss ?? NaN), elapsed: duration(status.wall_time_s ?? NaN),
      "per step": duration((last("step_time_s") || {}).step_time_s) };
    byId("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value && value !== "—").map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }));
    return live;
  };
  const trouble = (text) => { setText("trouble", text); byId("trouble").hidden = !text; };

  // ---------------------------------------------------------------- curves

  const charts = new Map();
  const fieldOf = (spec) => {
    if (spec.fields[0] !== setup.pass_prefix) return spec.fields.find((field) => last(field));
    const sizes = Object.keys(last("eval_correct_rate") || {}).filter((name) => name.startsWith(setup.pass_prefix));
    return sizes.length ? sizes.sort((a, b) => a.slice(setup.pass_prefix.length) - b.slice(setup.pass_prefix.length)).pop() : undefined;
  };
  const isGraded = () => rows.some((row) => ["reward_p10", "reward_p50", "reward_p90"].some((name) => name in row && row[name] !== 0 && row[name] !== 1));
  const specs = () => {
    const graded = isGraded(), pools = rows.some((row) => row.sepa_lambda);
    return [...setup.charts.filter((spec) => (graded || !spec.is_graded) && (pools || !spec.is_pooling)), ...more];
  };
  const ticks = (low, high) => {
    const size = 10 ** Math.floor(Math.log10((high - low) / 3 || 1)), step = [1, 2, 5, 10].map((n) => n * size).find((n) => (high - low) / n <= 4);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
    return found;
  };
  const plot = (svg, field, spec) => {
    if (field.startsWith(setup.pass_prefix)) svg.closest("figure").querySelector("h4").textContent = `Held-out pass@${field.slice(setup.pass_prefix.length)}`;
    const points = rows.filter((row) => field in row).map((row) => [row.step, row[field], row]);
    const width = Math.max(svg.clientWidth, 160), height = svg.clientHeight || 208, left = 54, right = 10, top = 20, bottom = 22;
    const banded = field === "eval_correct_rate", values = points.flatMap(([, value, row]) => banded ? [value, row.eval_ci_low ?? value, row.eval_ci_high ?? value] : [value]);
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= room; high += room; }
    if (spec.unit === "share" && high - low < 0.02) { low = Math.max(0, low - 0.01); high = Math.min(1, high + 0.01); }
    const begin = points[0][0], end = Math.max(points.at(-1)[0], begin + 1);
    const x = (step) => left + (step - begin) / (end - begin) * (width - left - right), y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
    const path = (pairs) => pairs.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const marks = [];
    for (const value of ticks(low, high)) {
      marks.push(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      marks.push(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, spec.unit === "share" ? `${Number((100 * value).toPrecision(6))}%` : brief(value, 5)));
    }
    marks.push(drawn("text", { x: left, y: height - 6 }, `step ${begin}`), drawn("text", { x: width - right, y: height - 6, "text-anchor": "end" }, String(points.at(-1)[0])));
    if (banded && points.length > 1) {
      const ends = (name) => points.map(([at, value, row]) => [at, row[name] ?? value]);
      marks.push(drawn("path", { class: "band", d: `${path(ends("eval_ci_low"))}${path(ends("eval_ci_high").reverse()).replace("M", "L")}Z` }));
    }
    marks.push(drawn("path", { class: "line", d: path(points) }));
    if (points.length < 40) marks.push(...points.map(([at, value]) => drawn("circle", { class: "dot", cx: x(at), cy: y(value), r: 3 })));
    svg.replaceChildren(...marks);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `${spec.title}: ${written(points[0][1], spec.unit)} at step ${begin}, ${written(points.at(-1)[1], spec.unit)} at step ${points.at(-1)[0]}`);
    svg.dataset.points = points.length;
    svg.onpointermove = (event) => {
      const at = begin + (event.offsetX - left) / (width - left - right) * (end - begin);
      const near = points.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
      svg.querySelectorAll(".cursor, .value").forEach((old) => old.remove());
      svg.append(drawn("line", { class: "cursor", x1: x(near[0]), x2: x(near[0]), y1: top, y2: height - bottom }),
        drawn("text", { class: "value", x: Math.min(Math.max(x(near[0]), 90), width - 90), y: 13, "text-anchor": "middle" }, `step ${near[0]}: ${written(near[1], spec.unit)}`));
    };
    svg.onpointerleave = () => svg.querySelectorAll(".cursor, .value").forEach((old) => old.remove());
  };
  const fold = (id, group) => {
    const made = element("details"), summary = element("summary");
    made.id = id;
    made.open = group === "Learning";
    summary.append(element("h3", group));
    made.append(summary, element("div", undefined, "plots"));
    made.addEventListener("toggle", () => { if (made.open) showCurves(); });
    return made;
  };
  const showCurves = () => {
    byId("no-curves").hidden = rows.length > 0;
    const found = new Set();
    for (const spec of specs()) {
      const field = fieldOf(spec);
      if (!field) continue;
      found.add(field);
      if (!charts.has(field)) {
        const id = `group-${spec.group}`;
        if (!byId(id)) byId("charts").append(fold(id, spec.group));
        const figure = element("figure"), caption = element("figcaption"), svg = drawn("svg", { class: "chart", role: "img" });
        caption.append(element("h4", spec.title), element("span", spec.note, "soft"));
        figure.append(caption, svg);
        byId(id).querySelector(".plots").append(figure);
        charts.set(field, svg);
      }
      const svg = charts.get(field);
      if (svg.closest("details").open) plot(svg, field, spec);
    }
    for (const [field, svg] of charts) svg.closest("figure").hidden = !found.has(field);
  };

  // ---------------------------------------------------------------- completions

  const asText = (excerpt) => excerpt.left_out ? `${excerpt.head}\n[${excerpt.left_out.toLocaleString("en")} characters left out]\n${excerpt.tail}` : excerpt.head;
  const card = (item) => {
    const made = element("article", undefined, `card ${item.is_right === null ? "" : item.is_right ? "right" : "wrong"}`), head = element("header");
    head.append(element("span", `group ${item.group}, completion ${item.index}`, "kind"), " ",
      element("span", item.reward === null ? item.outcome : `reward ${written(item.reward)}`, "reward"));
    const chips = [`${item.num_tokens ?? "?"} tokens`, item.stop_reason, item.trained ? "trained" : "not trained", ...Object.entries(item.parts).map(([name, value]) => `${name} ${written(value)}`)];
    const list = element("ul", undefined, "chips");
    list.append(...chips.filter(Boolean).map((chip) => element("li", chip)));
    made.append(head, element("p", asText(item.prompt), "prompt"), element("pre", asText(item.completion), "completion"), list);
    if (item.reference.head) made.append(element("p", `reference: ${asText(item.reference)}`, "soft"));
    if (item.detail.head) made.append(element("p", asText(item.detail), "soft"));
    return made;
  };
  const ask = async (what) => {
    const answer = await fetch(what, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  };
  const browse = async (step, first) => {
    const number = ++pending, found = await ask(`completions?step=${step}&first=${first}&shown=${encodeURIComponent(byId("shown").value)}`);
    if (number !== pending) return; // another step was requested meanwhile
    byId("step").value = step;
    byId("step").max = newest;
    byId("earlier").disabled = step <= 0;
    byId("later").disabled = step >= newest;
    const cards = found.items.map(card);
    if (first) byId("cards").append(...cards);
    else byId("cards").replaceChildren(...cards);
    const have = byId("cards").childElementCount;
    setText("found", `${found.count} of step ${step}${found.is_cut ? ", counted in its first 64 MB" : ""}; ${have} are shown`);
    byId("more").hidden = have >= found.count;
  };
  const turnTo = (step, first = 0) => browse(step, first).catch(lost);
  const chosen = () => Math.min(Math.max(0, Math.floor(Number(byId("step").value)) || 0), newest ?? 0);
  const stay = (step) => { byId("follow").checked = false; turnTo(step); };
  byId("earlier").addEventListener("click", () => stay(Math.max(0, chosen() - 1)));
  byId("later").addEventListener("click", () => stay(Math.min(newest, chosen() + 1)));
  byId("step").addEventListener("change", () => { if (newest !== null) stay(chosen()); });
  byId("shown").addEventListener("change", () => { if (newest !== null) turnTo(chosen()); });
  byId("more").addEventListener("click", () => turnTo(chosen(), byId("cards").childElementCount));
  byId("follow").addEventListener("change", () => { if (byId("follow").checked && newest !== null) turnTo(newest); });

  // ---------------------------------------------------------------- refresh

  const lost = (error) => trouble(`Nothing new: ${error.message}. Is \`retrain watch\` still running?`);
  const look = async () => {
    let wait = SOON_MS;
    try {
      const data = await ask(`data?generation=${generation}&rows=${rows.length}`), isNew = data.rows.length > 0 || data.generation !== generation;
      rows = rows.slice(0, data.first).concat(data.rows);
      generation = data.generation;
      more = data.charts;
      if (isNew) showCurves();
      if (!showStatus(data.status)) wait = LATER_MS;
      const hasNewer = data.newest_step !== null && data.newest_step !== newest;
      newest = data.newest_step ?? newest;
      if (hasNewer && byId("follow").checked) await turnTo(newest);
      else if (hasNewer) byId("later").disabled = chosen() >= newest;
      root.dataset.looks = Number(root.dataset.looks || 0) + 1;
    } catch (error) { lost(error); }
    setTimeout(look, document.hidden ? LATER_MS : wait);
  };

  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; showCurves(); } });
  look();
})();
