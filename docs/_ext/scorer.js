// Scores of the site's search. They are Sphinx's own, but for one: a heading that has the words of the query
// as they were typed ("figure 2") counts double, so that it stands before pages with one of these words.
var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) =>
    kind === "title" ? 2 * score : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
