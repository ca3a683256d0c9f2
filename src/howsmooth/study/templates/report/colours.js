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
