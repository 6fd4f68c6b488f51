// The page of `tinypod view`. Names come from folders that anybody may have named: they are written as text only.
"use strict"

const POLL_MS = 2000, PLAY_MS = 900, SERIES = 8
const byId = id => document.getElementById(id)
const state = {
  runs: [], chosen: [], focus: null, tab: "curves",
  logs: new Map(), // run id -> {generation, records, headline}
  colors: new Map(), // run id -> number of its colour
  board: null, // {run, rows, columns, symbols, box, givens, answer, position}
}

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value
    else if (name === "class") element.className = value
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value)
  }
  element.append(...children)
  return element
}

async function ask(address, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)}
  const answer = await fetch(address, options)
  const found = await answer.json()
  if (!answer.ok) throw new Error(found.error)
  return found
}

const of = (path, run, more = "") => `/api/${path}?run=${encodeURIComponent(run)}${more}`
const runById = id => state.runs.find(run => run.id === id)
const isPercent = name => /accuracy|agreement/.test(name || "")
const finite = value => typeof value === "number" && Number.isFinite(value)
const colorOf = id => `var(--s${state.colors.get(id) ?? 7})`

function short(value) {
  if (!finite(value)) return String(value ?? "–")
  const size = Math.abs(value)
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e")
  return size >= 100 ? value.toLocaleString("en", {maximumFractionDigits: 0}) : String(Number(value.toPrecision(4)))
}
const shown = (name, value) => isPercent(name) && finite(value) ? `${(100 * value).toFixed(1)} %` : short(value)

function duration(seconds) {
  for (const [size, unit] of [[60, "s"], [60, "min"], [24, "h"]]) {
    if (seconds < size) return `${seconds < 10 && unit === "h" ? seconds.toFixed(1) : Math.round(seconds)} ${unit}`
    seconds /= size
  }
  return `${seconds.toFixed(1)} days`
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${count.toPrecision(3)} ${unit}`
    count /= 1024
  }
  return `${count.toFixed(1)} GiB`
}

// ---- where we are: kept in the address, so that a page can be reloaded and shared between windows

function remember() {
  const parts = new URLSearchParams()
  if (state.chosen.length) parts.set("runs", state.chosen.join(","))
  if (state.focus) parts.set("run", state.focus)
  parts.set("tab", state.tab)
  history.replaceState(null, "", `#${parts}`)
}

function recall() {
  const parts = new URLSearchParams(location.hash.slice(1))
  for (const id of (parts.get("runs") || "").split(",")) if (id) choose(id, true)
  state.focus = parts.get("run")
  if (["curves", "health", "board"].includes(parts.get("tab"))) state.tab = parts.get("tab")
}

function choose(id, on) {
  state.chosen = state.chosen.filter(other => other !== id)
  if (on) {
    state.chosen.push(id)
    const taken = new Set(state.chosen.map(other => state.colors.get(other)))
    const free = [...Array(SERIES).keys()].find(number => !taken.has(number))
    if (!state.colors.has(id)) state.colors.set(id, free ?? state.chosen.length % SERIES)
  } else state.colors.delete(id)
}

// ---- the list of runs

const STATES = {running: "trains", lagging: "trains, lagging", silent: "no sign of life", new: "not started",
  early: "stopped early"}  // the others are words of their own

function drawRuns() {
  const wanted = byId("filter").value.toLowerCase(), list = byId("runs")
  const visible = state.runs.filter(run => run.name.toLowerCase().includes(wanted))
  const rows = new Map([...list.children].map(row => [row.dataset.run, row]))
  const order = visible.map(run => {
    const row = rows.get(run.id) || newRow(run)
    row.className = run.id === state.focus ? "focus" : ""
    const box = row.querySelector("input")
    box.disabled = isRelease(run) // it has no curves
    box.checked = state.chosen.includes(run.id)
    box.style.setProperty("--mark", colorOf(run.id))
    row.querySelector("button").setAttribute("aria-current", run.id === state.focus)
    row.querySelector(".dot").className = `dot ${run.state}`
    const done = run.step.toLocaleString("en"), steps = run.steps ? `${done} of ${run.steps.toLocaleString("en")}` : done
    const seen = ["running", "lagging", "release"].includes(run.state) ? "" : `, ${duration(run.age_s)} ago`
    const value = run.value === null ? "" : ` · ${shown(run.headline, run.value)}`
    const facts = `${STATES[run.state] || run.state}${seen} · step ${steps}${value}`
    if (row.querySelector(".words").textContent !== facts) row.querySelector(".words").textContent = facts
    return row
  })
  if (order.some((row, place) => list.children[place] !== row) || order.length !== list.children.length) {
    const focused = document.activeElement
    list.replaceChildren(...order)
    if (list.contains(focused)) focused.focus()
  }
  const none = byId("no-runs")
  none.hidden = visible.length > 0
  none.textContent = state.runs.length ? "No run has that in its name." : "No runs here yet: `tinypod train` makes them."
}

const isRelease = run => run?.state === "release"

function focusOn(run) {
  state.focus = run.id
  if (isRelease(run)) state.tab = "board"
  else if (!state.chosen.includes(run.id)) choose(run.id, true)
}

function newRow(run) {
  const box = make("input", {type: "checkbox", "aria-label": `Curves of ${run.name}`, onchange: () => {
    choose(run.id, box.checked)
    if (box.checked && !state.focus) state.focus = run.id
    changed()
  }})
  const button = make("button", {type: "button", onclick: () => {
    focusOn(run)
    changed()
  }}, make("span", {class: "name", text: run.name}),
  make("span", {class: "facts"}, make("span", {class: "dot"}), make("span", {class: "words"})))
  return make("li", {"data-run": run.id}, box, button)
}

// ---- curves

const SVG = "http://www.w3.org/2000/svg"
const MARGIN = {left: 52, right: 14, top: 8, bottom: 24}, HEIGHT = 220

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "mark") element.style.setProperty("--mark", value)
    else if (name === "text") element.textContent = value
    else element.setAttribute(name, value)
  }
  element.append(...children)
  return element
}

function charts() {
  const heldOut = [...new Set(state.chosen.map(id => state.logs.get(id)?.headline).filter(Boolean))]
  return [
    {name: "train/loss", title: "Training loss", smooth: true, log: true},
    ...heldOut.map(name => ({name, title: `Held-out ${name.replace(/^eval\//, "").replaceAll("_", " ")}`})),
    {name: "train/learning_rate", title: "Learning rate"},
    {name: "perf/examples_per_s", title: "Examples per second", zero: true},
  ]
}

function column(id, name) {
  const records = state.logs.get(id)?.records || []
  return records.filter(record => finite(record[name])).map(record => [record.step, record[name]])
}

function smoothed(points) {
  // A centred mean over about a fortieth of the curve; the window shrinks at the ends.
  const half = Math.floor(points.length / 80)
  return points.map(([step], i) => {
    const reach = Math.min(half, i, points.length - 1 - i)
    let sum = 0
    for (let j = i - reach; j <= i + reach; j++) sum += points[j][1]
    return [step, sum / (2 * reach + 1)]
  })
}

function thinned(points, count) {
  if (points.length <= count) return points
  const every = points.length / count
  return Array.from({length: count}, (_, i) => points[Math.floor(i * every)]).concat([points.at(-1)])
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw))
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(size => size >= raw * 0.999)
  const found = []
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value)
  return found
}

function logTicks(low, high) {
  const found = []
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power)
  const inside = found.filter(value => value >= low && value <= high)
  return inside.length > 7 ? inside.filter(value => /^1/.test(value.toExponential())) : inside
}

function drawCurves() {
  byId("legend").replaceChildren(...state.chosen.filter(runById).map(id => {
    const swatch = make("span", {class: "swatch"})
    swatch.style.setProperty("--mark", colorOf(id))
    return make("li", {}, swatch, runById(id).name)
  }))
  const holder = byId("charts"), wanted = charts()
  const there = new Map([...holder.children].map(figure => [figure.dataset.metric, figure]))
  const figures = wanted.map(chart => there.get(chart.name) || newFigure(chart))
  if (figures.length !== holder.children.length || figures.some((figure, i) => holder.children[i] !== figure))
    holder.replaceChildren(...figures)
  wanted.forEach((chart, i) => drawChart(figures[i], chart))
}

function newFigure(chart) {
  const figure = make("figure", {"data-metric": chart.name, tabindex: 0},
    make("h3", {text: chart.title}), svg("svg", {role: "img"}), make("div", {class: "readout", hidden: ""}))
  const picture = figure.querySelector("svg")
  const away = () => { figure.cursor = null; drawCursor(figure) }
  picture.addEventListener("pointermove", event => {
    const scale = figure.scale
    if (!scale) return
    figure.cursor = scale.step(event.clientX - picture.getBoundingClientRect().left)
    drawCursor(figure)
  })
  picture.addEventListener("pointerleave", away)
  figure.addEventListener("blur", away)
  figure.addEventListener("keydown", event => {
    const direction = {ArrowLeft: -1, ArrowRight: 1}[event.key]
    if (!direction || !figure.scale) return
    event.preventDefault()
    const steps = [...new Set(figure.scale.lines.flatMap(line => line.points.map(point => point[0])))]
      .sort((a, b) => a - b)
    const nearest = figure.cursor === null || figure.cursor === undefined ? steps.length :
      steps.reduce((best, step, i) => Math.abs(step - figure.cursor) < Math.abs(steps[best] - figure.cursor) ? i : best, 0)
    figure.cursor = steps[Math.max(0, Math.min(steps.length - 1, nearest + direction))]
    drawCursor(figure)
  })
  return figure
}

function drawChart(figure, chart) {
  const picture = figure.querySelector("svg"), width = picture.clientWidth || 400
  const lines = state.chosen.filter(runById).map(id => {
    const points = column(id, chart.name)
    return {id, raw: points, points: chart.smooth ? smoothed(points) : points}
  }).filter(line => line.points.length)
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`)
  if (!lines.length) {
    figure.scale = null
    picture.setAttribute("aria-label", `${chart.title}: nothing logged yet`)
    picture.replaceChildren(svg("text", {x: width / 2, y: HEIGHT / 2, "text-anchor": "middle", text: "nothing logged yet"}))
    return
  }
  const values = lines.flatMap(line => line.raw.map(point => point[1]))
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b))
  const logarithmic = chart.log && low > 0 && high > 10 * low
  if (isPercent(chart.name)) [low, high] = [0, Math.max(1, high)]
  if (chart.zero) low = Math.min(0, low)
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(low * 0.9, low * 1.1), Math.max(low * 0.9, low * 1.1)]
  const right = Math.max(1, ...lines.map(line => line.points.at(-1)[0]))
  const span = width - MARGIN.left - MARGIN.right, rise = HEIGHT - MARGIN.top - MARGIN.bottom
  const bend = logarithmic ? Math.log : value => value
  const x = step => MARGIN.left + span * step / right
  const y = value => MARGIN.top + rise * (1 - (bend(value) - bend(low)) / (bend(high) - bend(low)))
  const parts = []
  for (const value of logarithmic ? logTicks(low, high) : ticks(low, high, 4)) {
    parts.push(svg("line", {class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value)}))
    const label = isPercent(chart.name) ? `${Math.round(100 * value)} %` : short(value)
    parts.push(svg("text", {x: MARGIN.left - 7, y: y(value) + 4, "text-anchor": "end", text: label}))
  }
  for (const step of ticks(0, right, Math.max(2, Math.min(6, span / 75)))) {
    if (!Number.isInteger(step)) continue
    const anchor = x(step) > width - MARGIN.right - 18 ? "end" : "middle"
    parts.push(svg("text", {x: x(step), y: HEIGHT - 6, "text-anchor": anchor, text: step.toLocaleString("en")}))
  }
  parts.push(svg("line", {class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom}))
  const path = points => "M" + thinned(points, 2 * span).map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join("L")
  for (const line of lines) {
    if (chart.smooth && line.raw.length > 80) parts.push(svg("path", {class: "curve raw", d: path(line.raw), mark: colorOf(line.id)}))
    parts.push(svg("path", {class: "curve", d: path(line.points), mark: colorOf(line.id), "data-run": line.id, "data-points": line.points.length}))
    if (line.points.length <= 20)
      for (const [step, value] of line.points) parts.push(svg("circle", {class: "point", cx: x(step), cy: y(value), r: 3, mark: colorOf(line.id)}))
  }
  parts.push(svg("g", {class: "at"}))
  picture.replaceChildren(...parts)
  const last = lines.map(line => `${runById(line.id).name}: ${shown(chart.name, line.points.at(-1)[1])} at step ${line.points.at(-1)[0]}`)
  picture.setAttribute("aria-label", `${chart.title}. ${last.join("; ")}`)
  figure.scale = {x, y, lines, width, chart, step: place => right * (place - MARGIN.left) / span}
  drawCursor(figure)
}

function drawCursor(figure) {
  const {scale, cursor} = figure, box = figure.querySelector(".readout"), group = figure.querySelector("g.at")
  box.hidden = !scale || cursor === null || cursor === undefined
  if (group) group.replaceChildren()
  if (box.hidden) return
  const near = scale.lines.map(line => ({line, point: line.points.reduce((best, point) =>
    Math.abs(point[0] - cursor) < Math.abs(best[0] - cursor) ? point : best)}))
  const step = near.reduce((best, {point}) => Math.abs(point[0] - cursor) < Math.abs(best - cursor) ? point[0] : best, Infinity)
  group.append(svg("line", {class: "cursor", x1: scale.x(step), x2: scale.x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom}))
  box.replaceChildren(make("div", {class: "quiet", text: `step ${step.toLocaleString("en")}`}))
  for (const {line, point} of near) {
    group.append(svg("circle", {class: "point", cx: scale.x(point[0]), cy: scale.y(point[1]), r: 4, mark: colorOf(line.id)}))
    const swatch = make("span", {class: "swatch"})
    swatch.style.setProperty("--mark", colorOf(line.id))
    const where = point[0] === step ? "" : ` (step ${point[0].toLocaleString("en")})`
    box.append(make("div", {}, swatch, `${shown(scale.chart.name, point[1])}${where}  ${runById(line.id)?.name ?? ""}`))
  }
  const at = scale.x(step), picture = figure.querySelector("svg")
  const onTheLeft = at > scale.width / 2
  box.style.top = `${picture.offsetTop || 36}px`
  box.style.left = onTheLeft ? "auto" : `${at + 24}px`
  box.style.right = onTheLeft ? `${scale.width - at + 24}px` : "auto"
}

async function drawDifferences() {
  const ids = state.chosen.filter(runById), box = byId("differences")
  const key = ids.join()
  if (ids.length < 2) { box.hidden = true; box.dataset.of = ""; return }
  if (box.dataset.of === key) return
  const {rows} = await ask(`/api/differences?${ids.map(id => `run=${id}`).join("&")}`)
  box.dataset.of = key
  box.hidden = false
  const head = make("tr", {}, make("th", {scope: "col", text: "key"}),
    ...ids.map(id => make("th", {scope: "col", text: runById(id)?.name ?? ""})))
  const body = rows.map(row => make("tr", {}, make("th", {scope: "row", text: row.key}),
    ...row.values.map(value => make("td", {text: value ?? "–"}))))
  if (!rows.length) body.push(make("tr", {}, make("td", {colspan: ids.length + 1, text: "nowhere: they are the same"})))
  box.querySelector("table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body))
}

// ---- health

const KINDS = {stepping: "training steps that were kept", compiling: "tracing and compiling", data: "waiting for data",
  waiting: "waiting for other processes", evaluating: "evaluating", saving: "writing checkpoints",
  restoring: "reading checkpoints", starting: "starting", closing: "closing metrics and checkpoints", ending: "ending",
  lost: "steps done again after a restart or rollback", down: "no process, between a crash and the next start"}
const KIND_COLORS = {stepping: 2, compiling: 0, data: 5, waiting: 4, evaluating: 4, saving: 3, restoring: 3, starting: 7,
  closing: 7, ending: 7, lost: 1, down: 1}

async function drawHealth() {
  const run = state.focus
  if (!run) return
  let found
  try {
    found = await ask(of("health", run))
  } catch (error) {
    byId("health").replaceChildren(make("p", {class: "error", text: error.message}))
    return
  }
  if (run !== state.focus) return
  byId("health").replaceChildren(make("h2", {class: "of", text: runById(run)?.name ?? ""}),
    make("div", {class: "panels"}, timePanel(found), factsPanel(found), processPanel(found)))
}

function timePanel({goodput}) {
  const panel = make("div", {class: "card"}, make("h3", {text: "Where the time went"}))
  if (goodput.unreadable) panel.append(make("p", {class: "error", text: goodput.unreadable}))
  if (!goodput.total_s) {
    panel.append(make("p", {class: "quiet", text: "Nothing recorded yet."}))
    return panel
  }
  const kinds = [...new Set([...Object.keys(KINDS), ...Object.keys(goodput.seconds)])].filter(kind => goodput.seconds[kind] >= 0.5)
  const bar = make("div", {class: "bar", "aria-hidden": "true"}), body = make("tbody")
  for (const kind of kinds) {
    const mark = `var(--s${KIND_COLORS[kind] ?? 7})`, share = goodput.seconds[kind] / goodput.total_s
    const part = make("span"), swatch = make("span", {class: "swatch"})
    part.style.setProperty("--mark", mark)
    part.style.width = `${100 * share}%`
    swatch.style.setProperty("--mark", mark)
    bar.append(part)
    body.append(make("tr", {}, make("th", {scope: "row"}, swatch, KINDS[kind] || kind),
      make("td", {class: "number", text: duration(goodput.seconds[kind])}),
      make("td", {class: "number", text: `${(100 * share).toFixed(1)} %`})))
  }
  const starts = goodput.attempts === 1 ? "one start" : `${goodput.attempts} starts`
  panel.append(make("p", {class: "big", text: `${(100 * goodput.goodput).toFixed(0)} % goodput`}),
    make("p", {class: "quiet", text: `of ${duration(goodput.total_s)} in ${starts}`}), bar, make("table", {}, body))
  return panel
}

function factsPanel({summary, goodput, skipped, nonfinite, checkpoints}) {
  const facts = [["state", summary],
    ["steps skipped as not finite", skipped ? short(skipped) : "none"],
    ["losses logged that are not finite", nonfinite || "none"],
    ["rollbacks", goodput.rollbacks || "none"],
    ["steps done again", goodput.lost_steps ? short(goodput.lost_steps) : "none"],
    ["memory that the step needs, a device", goodput.step_bytes ? bytes(goodput.step_bytes) : "not known"],
    ["memory reached, fullest device", goodput.peak_bytes ? bytes(goodput.peak_bytes) : "not reported by this device"],
    ["compiled", `${goodput.compiles} programs in ${duration(goodput.compile_s)}, ${goodput.cache_hits} from the cache`],
    ["hardware", goodput.hardware ?? "not known"],
    ["checkpoints", checkpoints.length ? checkpoints.slice(-5).map(step => step.toLocaleString("en")).join(", ") : "none yet"]]
  return make("div", {class: "card"}, make("h3", {text: "Facts"}), make("table", {}, make("tbody", {},
    ...facts.map(([name, value]) => make("tr", {}, make("th", {scope: "row", text: name}), make("td", {text: value}))))))
}

function processPanel({processes, missing, time}) {
  const panel = make("div", {class: "card wide"}, make("h3", {text: "Processes"}))
  if (!processes.length) {
    panel.append(make("p", {class: "quiet", text: "No heartbeat: this run has not started yet, or another process trains it."}))
    return panel
  }
  const names = ["#", "host", "step", "phase", "step time", "seen", "verdict"]
  const rows = processes.map(p => [p.process, p.host, p.step.toLocaleString("en"), p.ended ? "" : p.phase,
    p.step_ms.p50 === undefined ? "" : `${short(p.step_ms.p50)} ms`, `${duration(Math.max(0, time - p.time))} ago`,
    p.unreadable ?? p.verdict])
  rows.push(...missing.map(number => [number, "", "", "", "", "", "no heartbeat"]))
  panel.append(make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Processes"}, make("table", {},
    make("thead", {}, make("tr", {}, ...names.map(name => make("th", {scope: "col", text: name})))),
    make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(value => make("td", {text: value}))))))))
  return panel
}

// ---- the board

async function openBoard() {
  const run = state.focus
  if (!run || state.board?.run === run) return
  stopPlaying()
  state.board = {run, answer: null, position: 0}
  byId("play").hidden = true
  document.querySelector("#board .of").textContent = runById(run)?.name ?? ""
  say("")
  try {
    const found = await ask(of("board", run))
    if (state.board.run !== run) return
    Object.assign(state.board, found, {givens: found.symbols[0].repeat(found.rows * found.columns)})
  } catch (error) {
    if (state.board.run === run) say(error.message)
    return
  }
  buildGrid()
  byId("play").hidden = false
  drawBoard()
}

function say(message) {
  byId("board-error").hidden = !message
  byId("board-error").textContent = message
}

function buildGrid() {
  const {rows, columns, box, symbols} = state.board, grid = byId("grid")
  grid.style.setProperty("--rows", rows)
  grid.style.setProperty("--columns", columns)
  grid.style.setProperty("--size", `${Math.max(0.5, Math.min(1.5, 13 / columns))}rem`)
  const cells = Array.from({length: rows * columns}, (_, place) => {
    const row = Math.floor(place / columns), across = place % columns
    const edges = [box && (across + 1) % box[1] === 0 && "right-edge", box && (row + 1) % box[0] === 0 && "bottom-edge",
      across === columns - 1 && "last-column", row === rows - 1 && "last-row"]
    return make("input", {class: "cell", "data-edges": edges.filter(Boolean).join(" "), maxlength: 2, autocomplete: "off",
      inputmode: symbols.length <= 10 ? "numeric" : "text", "aria-label": `Row ${row + 1}, column ${across + 1}`,
      oninput: event => typed(place, event.target.value), onkeydown: event => moved(place, event),
      onfocus: event => event.target.select(), onpaste: pasted})
  })
  grid.replaceChildren(...cells)
  const blank = box ? "a dot or 0 is a blank" : `characters of ${symbols}`
  byId("paste-help").textContent = `${rows * columns} characters, row by row; ${blank}.`
}

const cellAt = place => byId("grid").children[place]

function setGivens(text) {
  stopPlaying()
  Object.assign(state.board, {givens: text, answer: null, position: 0})
  say("")
  drawBoard()
}

function typed(place, text) {
  const {symbols, givens, box, columns, rows} = state.board
  let symbol = [...text].reverse().find(character => character.trim() && !"·".includes(character)) ?? symbols[0]
  symbol = box ? symbol.toUpperCase() : symbol.toLowerCase()
  if (box && symbol === "0") symbol = symbols[0]
  const good = symbols.includes(symbol)
  if (good) setGivens(givens.slice(0, place) + symbol + givens.slice(place + 1))
  else { drawBoard(); say(`“${symbol}” cannot stand here: type one of ${symbols.slice(box ? 1 : 0)}`) }
  if (good && symbol !== symbols[0] && place + 1 < rows * columns) cellAt(place + 1).focus()
  else cellAt(place).select()
}

function moved(place, event) {
  const {rows, columns} = state.board
  const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[event.key]
  if (by) {
    event.preventDefault()
    const next = place + by
    if (next >= 0 && next < rows * columns) cellAt(next).focus()
  } else if (event.key === "Enter") solve()
}

function pasted(event) {
  const text = event.clipboardData.getData("text").replace(/\s+/g, "")
  if (text.length < 2) return
  event.preventDefault()
  take(text)
}

function take(text) {
  const {rows, columns, symbols, box} = state.board
  let cells = text.replace(/\s+/g, "")
  cells = box ? cells.toUpperCase().replace(/[0_·*]/g, ".") : cells.toLowerCase()
  if (cells.length !== rows * columns) {
    say(`That has ${cells.length} characters; this board has ${rows * columns} cells.`)
    return
  }
  const strange = [...cells].find(character => !symbols.includes(character))
  if (strange) say(`“${strange}” is no cell of this puzzle: expected characters of ${symbols}`)
  else { byId("paste").value = ""; setGivens(cells) }
}

async function solve() {
  const board = state.board, button = byId("solve")
  if (!board?.givens || button.disabled) return
  stopPlaying()
  button.disabled = true
  button.textContent = "Solving…"
  say("")
  try {
    const answer = await ask("/api/solve", {run: board.run, puzzle: board.givens})
    if (state.board !== board || answer.puzzle !== board.givens) return
    board.answer = answer
    board.position = 1
    drawBoard()
    play()
  } catch (error) {
    if (state.board === board) say(error.message)
  } finally {
    button.disabled = false
    button.textContent = "Solve"
  }
}

async function showExample() {
  const board = state.board
  board.example = board.example === undefined ? Math.floor(Math.random() * 1000) : board.example + 1
  try {
    const {puzzle} = await ask(of("example", board.run, `&number=${board.example}`))
    if (state.board === board) setGivens(puzzle)
  } catch (error) {
    if (state.board === board) say(error.message)
  }
}

let timer = null
function stopPlaying() {
  clearInterval(timer)
  timer = null
  byId("run").textContent = "Play"
  byId("run").setAttribute("aria-pressed", "false")
}

function play() {
  const {answer} = state.board
  if (state.board.position >= answer.steps.length) state.board.position = 0
  byId("run").textContent = "Pause"
  byId("run").setAttribute("aria-pressed", "true")
  drawBoard()
  timer = setInterval(() => {
    state.board.position += 1
    drawBoard()
    if (state.board.position >= answer.steps.length) stopPlaying()
  }, PLAY_MS)
}

function goTo(position) {
  const {answer} = state.board
  if (!answer) return
  stopPlaying()
  state.board.position = Math.max(0, Math.min(answer.steps.length, position))
  drawBoard()
}

function drawBoard() {
  const {symbols, givens, answer, position, box} = state.board, blank = symbols[0]
  const cellsAt = number => number === 0 ? givens : answer.steps[number - 1].cells
  const now = cellsAt(position), before = position > 1 ? cellsAt(position - 1) : now
  const broken = new Set(position ? answer.steps[position - 1].broken : [])
  ;[...byId("grid").children].forEach((cell, place) => {
    const given = box ? givens[place] !== blank : position > 0 && now[place] === givens[place]
    const marks = ["cell", cell.dataset.edges, given && "given", now[place] !== before[place] && "changed",
      broken.has(place) && "broken"]
    cell.className = marks.filter(Boolean).join(" ")
    const text = now[place] === blank && box ? "" : now[place]
    if (cell.value !== text) cell.value = text
    cell.setAttribute("aria-description", [given && "given", marks[3], marks[4] && "breaks a rule"].filter(Boolean).join(", "))
  })
  byId("refinement").hidden = !answer
  if (answer) drawStep(answer, position, now, before)
}

function drawStep(answer, position, now, before) {
  const steps = answer.steps, step = steps[position - 1]
  byId("where").textContent = position ? `Step ${position} of ${steps.length}` : "The puzzle"
  byId("sure").replaceChildren(...(step ?
    ["The model is ", make("b", {text: `${Math.floor(100 * step.confidence)} %`}), " sure that this is right."] :
    ["Before the first step."]))
  const stop = answer.stops_at
  const count = [...now].filter((symbol, place) => symbol !== before[place]).length
  const words = []
  if (step?.solved) words.push(make("span", {class: "good", text: "A valid solution. "}))
  else if (step?.broken.length) words.push(make("span", {class: "bad", text: `${step.broken.length} ${step.broken.length === 1 ? "cell breaks" : "cells break"} a rule. `}))
  if (position > 1) words.push(count ? `${count} ${count === 1 ? "cell" : "cells"} changed. ` : "No cell changed. ")
  if (position && position === stop) words.push(make("b", {text: "It would stop here."}))
  else if (stop && position > stop) words.push(`It would have stopped at step ${stop}.`)
  byId("state").replaceChildren(...words)
  const verdict = answer.verdict || (stop ? `the model would have stopped at step ${stop}` : `the model would not have stopped within ${steps.length} steps`)
  byId("verdict").textContent = `In all: ${verdict}. Checkpoint of step ${answer.checkpoint.toLocaleString("en")}.`
  const slider = byId("slider")
  slider.max = steps.length
  slider.value = position
  slider.setAttribute("aria-valuetext", byId("where").textContent)
  byId("previous").disabled = position === 0
  byId("next").disabled = position === steps.length
  const strip = byId("confidence")
  if (strip.answer !== answer) {
    strip.answer = answer
    const every = Math.ceil(steps.length / 16) // more numbers than that would run into each other
    strip.replaceChildren(...steps.map((one, i) => {
      const numbered = (i + 1) % every === 0 && !(Math.abs(i + 1 - stop) < every)
      const bar = make("i"), stops = i + 1 === stop
      bar.style.height = `${100 * one.confidence}%`
      const label = `Step ${i + 1}: ${Math.floor(100 * one.confidence)} % sure${stops ? "; it would stop here" : ""}`
      return make("button", {type: "button", class: stops ? "stop" : "", "aria-label": label, title: label, onclick: () => goTo(i + 1)},
        bar, make("small", {text: stops ? `${i + 1}\nstop` : numbered ? i + 1 : ""}))
    }))
  }
  ;[...strip.children].forEach((bar, i) => i + 1 === position ? bar.setAttribute("aria-current", "step") : bar.removeAttribute("aria-current"))
}

// ---- all of it together

function changed() {
  remember()
  draw()
  refresh()
}

function draw() {
  drawRuns()
  const focused = runById(state.focus), any = Boolean(focused || state.chosen.some(runById))
  byId("hint").hidden = any || !state.runs.length
  byId("content").hidden = !any
  byId("tab-board").hidden = !focused?.puzzle
  byId("tab-health").hidden = !focused || isRelease(focused)
  const tab = byId(`tab-${state.tab}`).hidden ? "curves" : state.tab
  for (const button of document.querySelectorAll("[role=tab]")) {
    const on = button.dataset.tab === tab
    button.setAttribute("aria-selected", on)
    button.tabIndex = on ? 0 : -1
    byId(button.dataset.tab).hidden = !on
  }
  if (tab === "curves") drawCurves()
  if (tab === "board") openBoard()
  return tab
}

async function refreshLog(id) {
  const log = state.logs.get(id) || {generation: 0, records: [], headline: null}
  const found = await ask(of("metrics", id, `&generation=${log.generation}&since=${log.records.length}`))
  const records = found.generation === log.generation ? log.records.concat(found.records) : found.records
  state.logs.set(id, {generation: found.generation, records: records.slice(0, found.total), headline: found.headline})
}

let refreshing = null, again = false
function refresh() {
  // One at a time; what is asked for meanwhile is done right after.
  if (refreshing) { again = true; return refreshing }
  refreshing = refreshOnce().finally(() => {
    refreshing = null
    if (again) { again = false; refresh() }
  })
  return refreshing
}

async function refreshOnce() {
  const live = byId("live")
  try {
    const found = await ask("/api/runs")
    state.runs = found.runs
    byId("folders").textContent = found.folders.join(", ")
    const own = state.runs.filter(run => !isRelease(run)), candidates = own.length ? own : state.runs
    if (!state.focus && !state.chosen.length && candidates.length === 1) focusOn(candidates[0])
    await Promise.all(state.chosen.filter(runById).map(refreshLog))
    const tab = draw()
    if (tab === "curves") await drawDifferences()
    if (tab === "health") await drawHealth()
    const training = state.runs.filter(run => ["running", "lagging"].includes(run.state)).length
    live.className = ""
    live.textContent = `${own.length} ${own.length === 1 ? "run" : "runs"}, ${training || "none"} training`
  } catch (error) {
    live.className = "gone"
    live.textContent = error instanceof TypeError ? "No answer: start `tinypod view` again" : error.message
  }
}

for (const button of document.querySelectorAll("[role=tab]")) {
  button.addEventListener("click", () => { state.tab = button.dataset.tab; changed() })
  button.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], tabs = [...document.querySelectorAll("[role=tab]:not([hidden])")]
    if (!by) return
    const next = tabs[(tabs.indexOf(button) + by + tabs.length) % tabs.length]
    next.click()
    next.focus()
  })
}
byId("filter").addEventListener("input", drawRuns)
byId("solve").addEventListener("click", solve)
byId("example").addEventListener("click", showExample)
byId("clear").addEventListener("click", () => setGivens(state.board.symbols[0].repeat(state.board.givens.length)))
byId("paste").addEventListener("input", event => {
  // As soon as it is whole; what is shorter may still be typed.
  if (event.target.value.replace(/\s+/g, "").length >= state.board.givens.length) take(event.target.value)
})
byId("paste").addEventListener("change", event => { if (event.target.value.trim()) take(event.target.value) })
byId("previous").addEventListener("click", () => goTo(state.board.position - 1))
byId("next").addEventListener("click", () => goTo(state.board.position + 1))
byId("run").addEventListener("click", () => timer ? stopPlaying() : play())
byId("slider").addEventListener("input", event => goTo(Number(event.target.value)))
addEventListener("resize", draw)
recall()
refresh()
setInterval(() => { if (!document.hidden) refresh() }, POLL_MS)
