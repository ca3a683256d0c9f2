// ---- what needs a script is shown once it runs

const scatterData = read("scatter-data");
if (scatterData !== null && scatterData.points.n.length > 0) {
  find("explore").hidden = false;
  new Scatter(scatterData);
}
