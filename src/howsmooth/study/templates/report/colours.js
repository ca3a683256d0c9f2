// ---- colours that do not depend on colour vision: viridis for numbers, Okabe and Ito's for names

const VIRIDIS = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37],
];
const BINS = 48;
const NAMED = {
  light: ["#0072b2", "#b34700", "#007a5a", "#a0467a", "#5b5b5b", "#7a5c00", "#2b6ea0", "#111111"],
  dark: ["#56b4e9", "#e69f00", "#2fc297", "#e08fbb", "#f0e442", "#b9b9b9", "#ff8a5c", "#ffffff"],
};
const SHAPES = ["circle", "square", "triangle", "diamond", "cross"];

const darkness = matchMedia("(prefers-color-scheme: dark)");

// Each end that is too near to the paper's colour is left out.
function continuous(share) {
  const place = (darkness.matches ? 0.3 + 0.7 * share : 0.8 * share) * (VIRIDIS.length - 1);
  const index = Math.min(VIRIDIS.length - 2, Math.floor(place));
  const [here, next] = [VIRIDIS[index], VIRIDIS[index + 1]];
  return `rgb(${here.map((part, k) => Math.round(part + (next[k] - part) * (place - index))).join(" ")})`;
}

function named(index) {
  const colours = NAMED[darkness.matches ? "dark" : "light"];
  return colours[index % colours.length];
}

function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Draw a marker's outline around a point.
function trace(context, shape, x, y, r) {
  context.beginPath();
  if (shape === "circle") context.arc(x, y, r, 0, 2 * Math.PI);
  else if (shape === "square") context.rect(x - 0.88 * r, y - 0.88 * r, 1.76 * r, 1.76 * r);
  else if (shape === "triangle") polygon(context, [[x, y - 1.2 * r], [x + 1.1 * r, y + 0.8 * r], [x - 1.1 * r, y + 0.8 * r]]);
  else if (shape === "diamond") polygon(context, [[x, y - 1.25 * r], [x + 1.25 * r, y], [x, y + 1.25 * r], [x - 1.25 * r, y]]);
  else {
    const w = 0.42 * r, l = 1.15 * r;
    polygon(context, [
      [x - w, y - l], [x + w, y - l], [x + w, y - w], [x + l, y - w], [x + l, y + w], [x + w, y + w],
      [x + w, y + l], [x - w, y + l], [x - w, y + w], [x - l, y + w], [x - l, y - w], [x - w, y - w],
    ]);
  }
}

function polygon(context, corners) {
  corners.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
}

// How the points of a plot are coloured by a key: each has a kind, which is drawn once, a colour and a shape.
function scaleOfColours(key, { names, groups, points, visible }) {
  if (key in names) {
    return {
      bar: false,
      of: (index, group) => [group[key], named(group[key]), SHAPES[group[key] % SHAPES.length]],
      ofGroup: (group) => named(group[key]),
    };
  }
  const ofPoints = key in points;
  const scaled = ofPoints ? Math.log : (value) => value;
  const missing = (value) => value === null || (ofPoints && value <= 0);
  const of = (index, group) => (ofPoints ? points[key][index] : group[key]);
  let [low, high] = [Infinity, -Infinity];
  for (const index of visible) {
    const value = of(index, groups[points.group[index]]);
    if (missing(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const share = (value) => (high > low ? (scaled(value) - scaled(low)) / (scaled(high) - scaled(low)) : 0.4);
  const bin = (value) => (missing(value) ? 0 : Math.round(share(value) * (BINS - 1)));
  return {
    bar: high >= low,
    label: { radius: "R", n: "n", layer: "layer", head: "head" }[key],
    ticks: ofPoints && high > 1.05 * low ? ticksBetween(low, high, 7) : wholeTicks(low, ofPoints ? low : high),
    share,
    of: (index, group) => {
      const place = bin(of(index, group));
      return [place, continuous(place / (BINS - 1)), "circle"];
    },
    ofGroup: (group) => (ofPoints ? null : continuous(bin(group[key]) / (BINS - 1))),
  };
}

function drawBar(context, { label, ticks, share }, { right, top, bottom }) {
  const [x, from, to] = [right + 16, top + 18, bottom];
  const step = (to - from) / BINS;
  for (let place = 0; place < BINS; place++) {
    context.fillStyle = continuous(place / (BINS - 1));
    context.fillRect(x, to - (place + 1) * step, 12, step + 0.5);
  }
  context.fillStyle = themed("ink");
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(label, x, top + 6);
  for (const tick of ticks) context.fillText(shown(tick), x + 17, to - share(tick) * (to - from), 44);
}

function wholeTicks(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 8));
  const found = [];
  for (let tick = low; tick <= high; tick += step) found.push(tick);
  return found;
}
