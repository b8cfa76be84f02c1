// A click on a column's head of a table.sortable sorts its rows by that column; rows without a value stay below.
document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable th button");
  if (!button) return;
  const head = button.parentElement, table = head.closest("table"), column = head.cellIndex;
  const up = head.getAttribute("aria-sort") === "descending" || !head.hasAttribute("aria-sort");
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const text = (row) => row.cells[column].textContent.trim();
  const number = (value) => parseFloat(value.replaceAll(",", ""));
  const order = (a, b) => {
    const [x, y] = [text(a), text(b)];
    if (!x || !y) return !x - !y;
    const words = isNaN(number(x)) || isNaN(number(y));
    const difference = words ? x.localeCompare(y, "en", {numeric: true}) : number(x) - number(y);
    return up ? difference : -difference;
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
});
for (const head of document.querySelectorAll("table.sortable th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
}

// What is wider than the screen can be moved with the keyboard, too. The theme wraps tables after this script has run.
new ResizeObserver(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .equation, figure.step, .wide, pre > code"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
}).observe(document.body);
