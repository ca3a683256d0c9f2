// ---- small tools; whatever comes from the data is written as text, never as markup

const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function read(id) {
  const node = find(id);
  return node === null ? null : JSON.parse(node.textContent);
}

// A number with so many digits, as words: a true minus sign, no zeros at the end.
function shown(value, digits = 4) {
  if (value === null) return "none";
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

// With so many decimals, and no negative zero.
function fixed(value, digits) {
  const words = value.toFixed(digits);
  return Number(words) === 0 ? words.replace("-", "") : words.replace("-", "−");
}

function percent(share) {
  const value = 100 * share;
  return `${value >= 10 ? value.toFixed(0) : value >= 0.095 ? value.toFixed(1) : value.toPrecision(1)} %`;
}

// The paper has what is folded away as well.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    details.dataset.opened = "for print";
  }
});
addEventListener("afterprint", () => {
  for (const details of document.querySelectorAll("details[data-opened]")) {
    details.open = false;
    delete details.dataset.opened;
  }
});
