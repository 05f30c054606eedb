"use strict";

/** Return a colour of the style sheet by the name of its property. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return 256 colours that go through the colours of a list in the style sheet. */
function palette(name) {
  const stops = colour(name)
    .split(/\s+/)
    .map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const first = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[first].map((part, k) => Math.round(part + (stops[first + 1][k] - part) * (at - first)));
    return `rgb(${mixed.join(" ")})`.replaceAll(" ", ",");
  });
}

// Colours follow square roots, so that small weights can be told apart. `full` is the inverse of `root`.
const root = (value) => Math.sign(value) * Math.sqrt(Math.abs(value));
const full = (value) => value * Math.abs(value);

/** Return the tooltip of a cell as HTML in the colours of the page, which Bokeh's own tooltips do not have. */
function tooltip([reader, source], ...numbers) {
  const box = "margin:-5px;padding:6px 10px;background:var(--card);color:var(--ink);font:13px/1.5 sans-serif";
  const row = ([name, value]) =>
    `<tr><td style="padding-right:12px;color:var(--quiet)">${name}</td><td style="text-align:right">${value}</td></tr>`;
  return `<div style="${box}"><b>${reader}</b> ${source}<table style="border-spacing:0">${numbers.map(row).join("")}</table></div>`;
}

/** The map of one model with its scale, and the list of the weights of one reader (a sublayer, or the output). */
class HeatMap {
  constructor(element, passage) {
    Object.assign(this, { element, passage, difference: false, token: 0 });
    this.find = (selector) => element.querySelector(selector);
    this.what = this.find(".what").textContent;
    const { readers, sources } = passage;
    this.cells = passage.means.flatMap((row, reader) => row.map((_, source) => [reader, source]));
    this.source = new Bokeh.ColumnDataSource({ data: this.columns() });
    this.mapper = new Bokeh.LinearColorMapper({ palette: ["#000000"], low: 0, high: 1 });
    this.plot = Bokeh.Plotting.figure({
      sizing_mode: "stretch_width",
      height: 300,
      min_width: 200,
      toolbar_location: null,
      tools: [],
      x_range: new Bokeh.Range1d({ start: -0.5, end: sources.length - 0.5 }),
      y_range: new Bokeh.Range1d({ start: readers.length - 0.5, end: -0.5 }),
      output_backend: "canvas",
    });
    const fill = { field: "shown", transform: this.mapper };
    const cells = this.plot.rect({
      x: { field: "column" },
      y: { field: "row" },
      width: 1,
      height: 1,
      fill_color: fill,
      line_color: fill,
      line_width: 0.5,
      source: this.source,
    });
    this.plot.add_tools(
      new Bokeh.HoverTool({
        renderers: [cells],
        tooltips: tooltip(["@reader", "reads @source"], ["this token", "@weight"], ["mean of the text", "@mean"]),
      }),
    );
    [this.columnsAxis] = this.plot.below;
    [this.rowsAxis] = this.plot.left;
    this.columnsAxis.axis_label = passage.attention ? "source" : "output";
    this.rowsAxis.axis_label = "reader";
    for (const axis of [this.columnsAxis, this.rowsAxis]) {
      axis.minor_tick_line_color = null;
      axis.major_tick_in = 0;
      axis.major_tick_out = 3;
    }
    this.plot.xgrid.visible = this.plot.ygrid.visible = false;
    this.columnsAxis.major_label_overrides = new Map(sources.map((name, i) => [i, name]));
    this.rowsAxis.major_label_overrides = new Map(readers.map((name, i) => [i, name]));
    this.find("select").addEventListener("change", () => this.list());
    this.plot.on_event("tap", ({ y }) => this.read(Math.round(y)));
  }

  /** Return the data of all cells as Bokeh takes it: one array for each field. */
  columns() {
    const { passage, token, difference, cells } = this;
    const column = (value) => cells.map(([reader, source]) => value(reader, source));
    return {
      row: column((reader) => reader),
      column: column((_, source) => source),
      reader: column((reader) => passage.readers[reader]),
      source: column((_, source) => passage.sources[source]),
      weight: column((reader, source) => shownNumber(passage.weight(reader, source, token))),
      mean: column((reader, source) => shownNumber(passage.means[reader][source])),
      shown: column((reader, source) =>
        root(passage.weight(reader, source, token) - (difference ? passage.means[reader][source] : 0)),
      ),
    };
  }

  /** Draw the map for the first time, and fit it to its width from then on. */
  async draw() {
    const plot = this.find(".plot");
    this.paint();
    this.fit(plot.clientWidth);
    await Bokeh.Plotting.show(this.plot, plot);
    new ResizeObserver(([{ contentRect }]) => this.fit(contentRect.width)).observe(plot);
  }

  /** Make cells and names as large as the width allows. */
  fit(width) {
    const { readers, sources } = this.passage;
    const many = readers.length > 30;
    const size = many || width < 420 ? 10 : 12;
    const step = many ? 13 : 22;
    const every = (count, space) => Math.max(1, Math.ceil((count * (size + 3)) / space));
    // The names of columns are horizontal if they have room.
    const room = Math.max(width - 110, 50);
    const flat = room / sources.length > 0.65 * size * Math.max(...sources.map((name) => name.length));
    this.columnsAxis.major_label_orientation = flat ? 0 : Math.PI / 2;
    const ticks = (count, apart) =>
      new Bokeh.FixedTicker({ ticks: Array.from({ length: Math.ceil(count / apart) }, (_, i) => i * apart) });
    this.plot.height = readers.length * step + (flat ? 55 : 105);
    this.columnsAxis.ticker = ticks(sources.length, flat ? 1 : every(sources.length, room));
    this.rowsAxis.ticker = ticks(readers.length, every(readers.length, readers.length * step));
    for (const axis of [this.columnsAxis, this.rowsAxis]) {
      axis.major_label_text_font_size = axis.axis_label_text_font_size = `${size}px`;
    }
  }

  /** Set the colours from the style sheet, which has different ones in dark mode. */
  paint() {
    const [card, ink, quiet, line] = ["--card", "--ink", "--quiet", "--line"].map(colour);
    this.plot.background_fill_color = colour("--absent");
    this.plot.border_fill_color = card;
    this.plot.outline_line_color = line;
    for (const axis of [this.columnsAxis, this.rowsAxis]) {
      axis.axis_line_color = axis.major_tick_line_color = line;
      axis.major_label_text_color = ink;
      axis.axis_label_text_color = quiet;
      axis.axis_label_text_font_style = "normal";
      axis.major_label_text_font = axis.axis_label_text_font = "sans-serif";
    }
    this.mapper.palette = palette(this.mapper.low < 0 ? "--differences" : "--weights");
    const ramp = this.mapper.palette.filter((_, i) => i % 15 === 0);
    this.find(".ramp").style.background = `linear-gradient(to right, ${ramp.join(", ")})`;
  }

  /** Set the ends of the colour scale. */
  scale({ low, high, least, most }) {
    Object.assign(this.mapper, { low: root(low), high: root(high) });
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => {
      const tick = document.createElement("span");
      const beyond = share === 0 && least < low ? "≤\u00a0" : share === 1 && most > high ? "≥\u00a0" : "";
      tick.textContent = beyond + shownNumber(full(root(low) + share * (root(high) - root(low))), this.difference);
      return tick;
    });
    this.find(".ticks").replaceChildren(...ticks);
    this.find(".what").textContent = this.difference ? "difference from the mean" : this.what;
    this.paint();
  }

  /** Show the weights of a token, given by its index and its word. */
  show(token, word) {
    this.token = token;
    this.source.data = this.columns();
    const quoted = document.createElement("q");
    quoted.textContent = word;
    this.find(".chosen").replaceChildren(`Token ${token + 1} of ${this.passage.tokens}: `, quoted);
    this.list();
  }

  /** Show a reader in the list. */
  read(reader) {
    if (reader >= 0 && reader < this.passage.readers.length) {
      this.find("select").value = reader;
      this.list();
    }
  }

  /** List the weights of the chosen reader as numbers, the largest first. */
  list() {
    const { passage, token } = this;
    const reader = Number(this.find("select").value);
    const rows = passage.means[reader].map((mean, source) => [source, passage.weight(reader, source, token), mean]);
    rows.sort((one, other) => Math.abs(other[1]) - Math.abs(one[1]) || one[0] - other[0]);
    const most = Math.max(...rows.map(([, weight]) => Math.abs(weight)), 1e-9);
    const make = (name, text = "") => Object.assign(document.createElement("span"), { className: name, textContent: text });
    const items = rows.slice(0, 6).map(([source, weight, mean]) => {
      const item = document.createElement("li");
      const bar = make(`bar${weight < 0 ? " negative" : ""}`);
      bar.style.width = `${(100 * Math.abs(weight)) / most}%`;
      item.append(
        make("name", passage.sources[source]),
        bar,
        make("value", shownNumber(weight)),
        make("mean", shownNumber(mean)),
      );
      return item;
    });
    if (rows.length > items.length) {
      const rest = rows.slice(items.length).reduce((sum, [, weight]) => sum + weight, 0);
      const item = document.createElement("li");
      item.append(make("name", `${rows.length - items.length} others`), make(""), make("value", shownNumber(rest)), make(""));
      items.push(item);
    }
    const heading = document.createElement("li");
    heading.append(make(""), make(""), make("value heading", "this token"), make("mean heading", "mean"));
    this.find("ol").replaceChildren(heading, ...items);
  }
}
