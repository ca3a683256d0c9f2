// ---- the explorer: uPlot draws; what is shown, in which colours and with which words, is chosen here

const ACROSS = { n: "length n", radius: "radius R" };
const KEYS = ["model", "text", "scope", "layer", "head", "quantity"];
const TITLES = { n: "sequence length n (tokens)", radius: "radius R (root mean square token norm)" };
const MOST_LINES = 60;
const MOST_VALUES = 12; // of lengths or radii that have a colour each; more of them share
const CLASSES = 8; // colours

const darkness = matchMedia("(prefers-color-scheme: dark)");
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// From green to violet in equal steps of lightness, by which they are told apart without colour vision as well, and
// always away from the page: the largest is the most distinct.
function colourAt(share) {
  return `oklch(${darkness.matches ? 0.56 + 0.38 * share : 0.64 - 0.38 * share} 0.13 ${120 + 190 * share})`;
}

// At most so many round numbers between two positive ones, or multiples of a step: uPlot has too few in a decade.
function ticks(low, high, step, most) {
  const least = Math.floor(Math.log10(low));
  const powers = Array.from({ length: 2 + Math.floor(Math.log10(high / low)) }, (_, k) => least + k);
  const choices = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 3], [1]].map((digits) => {
    const all = powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)));
    return all.filter((tick) => tick >= low && tick <= high);
  });
  const chosen = choices.find((found) => found.length <= most) ?? choices.at(-1);
  if (chosen.length >= 3) return chosen.filter((_, k) => k % Math.ceil(chosen.length / most) === 0);
  const first = Math.ceil(low / step);
  const count = 1 + Math.floor(high / step) - first;
  return Array.from({ length: count }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

// A scale's ends, with room beside the points.
function around(plot, low, high) {
  if (low === null) return [1, 10];
  const margin = high > 1.05 * low ? (high / low) ** 0.05 : 1.05;
  return [low / margin, high * margin];
}

// Lines for uPlot, each between two neighbouring entries of the data.
function segments(plot, series) {
  const stroke = new Path2D();
  const [xs, ys] = plot.data[series];
  xs.forEach((x, index) => {
    const place = [plot.valToPos(x, "x", true), plot.valToPos(ys[index], "y", true)];
    stroke[index % 2 ? "lineTo" : "moveTo"](...place);
  });
  return { stroke };
}

// What uPlot draws, as its data and their look: such lines, points, and a power law between two lengths.
const lines = (xs, ys, look) => [[xs, ys], { paths: segments, points: { show: false }, ...look }];
const dots = (xs, ys, look) => (
  [[xs, ys], { paths: () => null, points: { show: true, filter: () => [...xs.keys()], ...look } }]);
const power = (ends, { slope, intercept }, look) => (
  lines(ends, ends.map((end) => Math.exp(intercept + slope * Math.log(end))), { auto: false, ...look }));

class Scatter {
  constructor({ names, groups, points }) {
    Object.assign(this, { names, groups, points, x: "n", current: -1 });
    for (const part of ["legend", "lines", "fit", "mark", "tip", "summary", "said"]) this[part] = find(`scatter-${part}`);
    this.box = find("scatter");
    const several = (key) => key in ACROSS || new Set(groups.map((group) => group[key])).size > 1;
    this.colour = several("layer") ? "layer" : "radius";
    this.chooser = new Chooser(find("scatter-fields"), KEYS, names, groups, {
      choice: { model: 0, text: 0, scope: 0, quantity: 0 }, all: true, changed: () => this.choose(),
    });
    this.menu("across", "x", Object.keys(ACROSS));
    this.menu("colour", "colour", [...Object.keys(ACROSS), ...KEYS].filter(several));
    for (const [id, factor] of [["in", 0.5], ["out", 2], ["all", 0]]) find(`scatter-${id}`).onclick = () => this.zoom(factor);
    this.box.onpointermove = this.box.onpointerdown = (event) => this.point(event);
    // A finger that is lifted leaves, too; what it has chosen stays.
    this.box.onpointerleave = (event) => event.pointerType !== "touch" && this.show(-1);
    this.box.onkeydown = (event) => this.key(event);
    darkness.addEventListener("change", () => this.choose());
    this.choose();
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.box);
  }

  menu(label, field, keys) {
    const menu = this.chooser.menu(label, label, () => { this[field] = menu.value; this.choose(); });
    menu.append(...keys.map((key) => make("option", { value: key }, ACROSS[key] ?? key)));
    menu.value = this[field];
  }

  // ---- what is shown

  choose() {
    const { group, value, [this.x]: across } = this.points;
    const fits = this.groups.map((one) => this.chooser.fits(one));
    const fitting = [...group.keys()].filter((index) => fits[group[index]]);
    this.visible = fitting.filter((index) => value[index] > 0 && across[index] > 0)
      .sort((a, b) => across[a] - across[b] || value[a] - value[b]);
    this.zeros = fitting.length - this.visible.length;
    this.classify();
    this.legend.replaceChildren(...this.classes.map((one) => make("li", {}, this.button(one))));
    this.paint();
  }

  // Put the visible points into classes of one colour each.
  classify() {
    const key = this.colour;
    const values = this.points[key] ?? this.points.group.map((group) => this.groups[group][key]);
    const sorted = this.visible.map((index) => values[index]).sort(upwards);
    const each = [...new Set(sorted)];
    const alone = each.length <= MOST_VALUES || !(key in ACROSS);
    const equal = Array.from({ length: CLASSES }, (_, k) => sorted[Math.floor((k * sorted.length) / CLASSES)]);
    const starts = alone ? each : [...new Set(equal)];
    this.classes = starts.map((least, place) => ({
      label: alone ? this.chooser.name(key, least) : `${key === "n" ? "n" : "R"} from ${shown(least)}`,
      colour: colourAt(starts.length > 1 ? place / (starts.length - 1) : 0.5),
      points: this.visible.filter((index) => upwards(values[index], least) >= 0
        && (place === starts.length - 1 || upwards(values[index], starts[place + 1]) < 0)),
      on: true,
    }));
  }

  button(one) {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = one.colour;
    const button = make("button", { type: "button", "aria-pressed": true }, swatch, one.label);
    button.onclick = () => {
      one.on = !one.on;
      button.setAttribute("aria-pressed", one.on);
      this.paint();
    };
    return button;
  }

  // Say in words what is shown, below the plot and as its label.
  summarise() {
    const { value, converged, [this.x]: across } = this.points;
    const several = Object.keys(this.names).filter((axis) => new Set(this.chosen.map((one) => one[axis])).size > 1);
    const said = (one) => [one.where, ...several.map((axis) => this.names[axis][one[axis]]), one.exponent].join(", ");
    const loose = this.shown.filter((index) => !converged[index]).length;
    const words = [`${this.shown.length} measurements`];
    if (loose) words.push(`, ${loose} of them not converged (hollow, with their interval)`);
    if (this.zeros) words.push(`; ${this.zeros} more are zero and cannot be shown on log axes`);
    const [least, largest, count] = [this.fitted[0], this.fitted.at(-1), this.fitted.length];
    if (count === 1) words.push(`. One exponent: ${said(least)}`);
    if (count > 1) words.push(`. ${count} exponents. The least: ${said(least)}. The largest: ${said(largest)}`);
    if (count > MOST_LINES) words.push(`. Their lines are drawn for ${MOST_LINES} or fewer`);
    this.summary.textContent = `${words.join("")}.`;
    const span = (all) => {
      const values = this.shown.map((index) => all[index]);
      return `from ${shown(Math.min(...values))} to ${shown(Math.max(...values))}`;
    };
    this.box.setAttribute("aria-label", this.shown.length === 0 ? "Scatter plot without points"
      : `Scatter plot of constants ${span(value)}, against the ${ACROSS[this.x]} ${span(across)}. `
        + "The arrow keys go from point to point.");
  }

  describe(index) {
    const { group, n, sample, radius, value, lower, upper, converged } = this.points;
    const one = this.groups[group[index]];
    const [model, text, scope, quantity] = Object.keys(this.names).map((axis) => this.names[axis][one[axis]]);
    const known = lower[index] === null || upper[index] === null ? "no interval"
      : `${interval(lower[index], upper[index])}${converged[index] ? "" : ", not converged"}`;
    return [
      `${model}, ${one.where}, scope ${scope}`,
      `text ${text}, sample ${sample[index]}`,
      `n = ${n[index]}, radius ${shown(radius[index])}`,
      `${quantity === "measured" ? "constant" : quantity} ${shown(value[index], 6)}, ${known}`,
      one.exponent,
    ];
  }

  // ---- drawing

  size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  paint() {
    const on = this.classes.filter((one) => one.on);
    const there = new Set(on.flatMap((one) => one.points));
    this.shown = this.visible.filter((index) => there.has(index));
    const present = new Set(this.shown.map((index) => this.points.group[index]));
    this.chosen = this.groups.filter((one, index) => present.has(index));
    this.fitted = this.chosen.filter((one) => one.fit).sort((a, b) => a.fit.slope - b.fit.slope);
    this.current = -1;
    this.summarise();
    // The first series is empty: uPlot asks for one, also where nothing is shown.
    const nothing = lines([], [], { auto: false });
    const drawn = [nothing, ...this.references(), ...this.fits(), ...on.flatMap((one) => this.dots(one))];
    const facets = () => ["x", "y"].map((scale) => ({ scale, auto: true }));
    this.plot?.destroy();
    this.plot = new uPlot({
      ...this.size(),
      mode: 2,
      legend: { show: false },
      cursor: { x: false, y: false, points: { show: false }, drag: { x: true, y: true, dist: 5 } },
      hooks: { draw: [() => this.show(this.current)] },
      scales: Object.fromEntries(["x", "y"].map((scale) => [scale, { time: false, distr: 3, range: around }])),
      axes: [this.axis("x", TITLES[this.x], 60), this.axis("y", "local Lipschitz constant", 45)],
      series: [{}, ...drawn.map(([, look]) => ({ facets: facets(), ...look }))],
    }, [null, ...drawn.map(([data]) => data)], this.box);
  }

  axis(scale, label, space) {
    const font = "12px system-ui, sans-serif";
    const most = () => Math.max(3, Math.floor(this.size()[scale === "x" ? "width" : "height"] / space));
    const whole = scale === "x" && this.x === "n";
    // The lengths themselves where there is room for them, else round ones.
    const places = (low, high, step) => {
      const each = [...new Set(this.shown.map((index) => this.points.n[index]))].filter((n) => n >= low && n <= high);
      if (whole && each.length && each.length <= most()) return each;
      return ticks(low, high, step, most()).filter((tick) => !whole || Number.isInteger(tick));
    };
    return {
      scale, label, font, labelFont: font, labelSize: 22, size: scale === "x" ? 30 : 52, ticks: { show: false },
      stroke: themed("ink"), grid: { stroke: themed("line"), width: 1 },
      splits: (plot, axis, low, high, step) => places(low, high, step),
      filter: (plot, found) => found,
      values: (plot, found) => found.map((tick) => shown(tick)),
    };
  }

  // Lines of slope 1/4 and 1/2, where there are lengths to compare.
  references() {
    const { value, n } = this.points;
    const ends = [n[this.shown[0]], n[this.shown.at(-1)]];
    this.lines.hidden = this.x !== "n" || ends[0] === ends[1];
    if (this.lines.hidden) return [];
    const middle = Math.log(ends[0] * ends[1]) / 2;
    const fit = this.chosen.length === 1 && this.chosen[0].fit;
    const height = fit ? fit.intercept + fit.slope * middle
      : this.shown.reduce((sum, index) => sum + Math.log(value[index]), 0) / this.shown.length;
    const look = { stroke: themed("soft"), width: 1.3 };
    return [[1 / 4, [6, 4]], [1 / 2, [2, 3]]].map(([slope, dash]) => (
      power(ends, { slope, intercept: height - slope * middle }, { ...look, dash })));
  }

  // The points of a class; those that did not converge hollow, on a line that is their interval.
  dots({ points, colour }) {
    const { value, lower, upper, converged, [this.x]: across } = this.points;
    const of = (all, chosen) => chosen.map((index) => all[index]);
    const [loose, done] = [0, 1].map((wanted) => points.filter((index) => converged[index] === wanted));
    const low = (index) => (lower[index] > 0 ? lower[index] : value[index]);
    const ends = loose.flatMap((index) => [low(index), upper[index] ?? value[index]]);
    const size = this.box.clientWidth < 500 ? 6 : 8;
    return [
      lines(loose.flatMap((index) => [across[index], across[index]]), ends, { stroke: colour, width: 1.2 }),
      dots(of(across, done), of(value, done), { fill: colour, width: 0, size }),
      dots(of(across, loose), of(value, loose), { stroke: colour, fill: themed("paper"), width: 1.5, size }),
    ].filter(([[xs]]) => xs.length);
  }

  fits() {
    const drawn = this.fitted.length <= MOST_LINES ? this.fitted : [];
    this.fit.hidden = drawn.length === 0;
    if (this.x !== "n") return [];
    const groupOf = (index) => this.groups[this.points.group[index]];
    const colours = new Map(this.classes.flatMap((one) => one.points.map((index) => [groupOf(index), one.colour])));
    return drawn.map((one) => {
      const stroke = drawn.length === 1 ? themed("fit") : this.colour in ACROSS ? themed("ink") : colours.get(one);
      return power([one.fit.n_min, one.fit.n_max], one.fit, { stroke, width: 2.2 });
    });
  }

  // ---- pointing

  at(place) {
    const index = this.shown[place];
    const { value, [this.x]: across } = this.points;
    return [this.plot.valToPos(across[index], "x"), this.plot.valToPos(value[index], "y")];
  }

  point(event) {
    if (event.buttons && event.pointerType === "mouse") return; // A part to zoom into is being drawn.
    const inside = this.plot.over.getBoundingClientRect();
    let [found, least] = [-1, event.pointerType === "touch" ? 30 : 16];
    for (const place of this.shown.keys()) {
      const [x, y] = this.at(place);
      const distance = Math.hypot(x - event.clientX + inside.left, y - event.clientY + inside.top);
      if (distance < least) [found, least] = [place, distance];
    }
    this.show(found);
  }

  // Show the numbers of a point by its place among those shown; -1 is none.
  show(place) {
    this.current = place;
    const { clientWidth: width, clientHeight: height } = this.plot.over;
    const [x, y] = place < 0 ? [-1, -1] : this.at(place);
    this.mark.hidden = x < 0 || y < 0 || x > width || y > height;
    if (this.mark.hidden) return;
    this.plot.over.append(this.mark);
    Object.assign(this.mark.style, { left: `${x}px`, top: `${y}px` });
    this.tip.className = `tip ${x > width / 2 ? "left" : "right"} ${y > height / 2 ? "above" : "below"}`;
    this.tip.replaceChildren(...this.describe(this.shown[place]).map((words) => make("div", {}, words)));
  }

  // Zoom by a factor around the point that is shown, or the middle; 0 shows everything.
  zoom(factor) {
    if (factor === 0) return this.paint();
    for (const [scale, values] of [["x", this.points[this.x]], ["y", this.points.value]]) {
      const { min, max } = this.plot.scales[scale];
      const middle = values[this.shown[this.current]] ?? Math.sqrt(min * max);
      const half = (max / min) ** (factor / 2);
      this.plot.setScale(scale, { min: middle / half, max: middle * half });
    }
  }

  key(event) {
    const [here, last] = [this.current, this.shown.length - 1];
    const places = [...this.shown.keys()];
    const across = (place) => this.points[this.x][this.shown[place]];
    const next = {
      Home: () => 0,
      End: () => last,
      ArrowUp: () => Math.min(last, here + 1),
      ArrowDown: () => Math.max(0, here - 1),
      ArrowRight: () => places.find((place) => here < 0 || across(place) > across(here)) ?? here,
      ArrowLeft: () => places.findLast((place) => here < 0 || across(place) < across(here)) ?? here,
      Escape: () => -1,
    }[event.key];
    if (!next || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.show(next());
    if (this.current < 0) return;
    if (this.mark.hidden) this.zoom(1); // The point is outside of the part that is shown, which moves there.
    this.said.textContent = this.describe(this.shown[this.current]).join("; ");
  }
}

begin("scatter", ["explore", "to-explore"], (data) => new Scatter(data));
