"use strict";
// A field above the table of model types, which shows the lines that hold all of its words.
const table = document.querySelector("table.architectures");
const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
const field = document.createElement("input");
const count = document.createElement("output");
field.type = "search";
field.placeholder = "Search: llama, vision, refused, ...";
field.ariaLabel = "Search the model types";
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/);
  for (const [row, text] of rows) row.hidden = !words.every((word) => text.includes(word));
  count.value = ` ${rows.filter(([row]) => !row.hidden).length} of ${rows.length}`;
});
table.before(field, count);
