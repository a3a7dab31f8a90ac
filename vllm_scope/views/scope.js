/* Draws views from JSON. In a notebook, anywidget calls `render`. A saved page has this module, the
   data, and a call of `drawPage`.

   A view is {parts: [...]}. Each part has a `kind`, which is the name of a function in DRAW.
   vllm_scope/views/parts.py lists the other fields. A text becomes a text node or an attribute,
   never markup.

   Keys: Tab goes to the next strip or grid. The arrow keys, Home and End go from item to item in a
   strip or grid. A line below the items shows the numbers of the item with the focus, or of the
   item under the pointer. */

const DRAW = { text, heading, legend, strip, grid, section, bars, choice, side };

/** Draw a view into an element, and replace the element's children. `state` is a Map. It is empty
    before the first drawing. `state` keeps the focused items and the open sections between two
    drawings. */
function draw(root, view, state) {
  const active = root.getRootNode().activeElement;
  const focused = active && root.contains(active) ? active.closest("[data-key]")?.dataset.key : null;
  const scrolled = [...root.querySelectorAll("div.grid")].map(grid => grid.scrollLeft);
  root.classList.add("vllm-scope");
  root.replaceChildren(...drawn(view.parts ?? [], { key: "", state }));
  root.querySelectorAll("div.grid").forEach((grid, i) => { grid.scrollLeft = scrolled[i] ?? 0; });
  const there = focused && root.querySelector(`[data-key="${CSS.escape(focused)}"]`);
  // The focus must not change the scroll position of the page.
  if (there) (there.querySelector('[tabindex="0"]') ?? there).focus({ preventScroll: true });
}

/** The elements of some parts. A part's key is its kind and place. "side0.1.strip2" is the third
    part of the second option of the first part. The key contains the kind. Therefore a grid never
    gets the state of a strip in the same place. The place of a section is the section's id, because
    the number of sections before the section can change. */
function drawn(parts, { key, state }) {
  return parts.map((part, i) => {
    const place = part.kind === "section" ? `[${part.id}]` : i;
    return DRAW[part.kind](part, { key: `${key && `${key}.`}${part.kind}${place}`, state });
  });
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function text(part) {
  return element("p", {}, part.text);
}

function heading(part) {
  return element("h2", {}, part.text);
}

function legend(part) {
  const scale = element("i", { class: part.up ? "scale up" : "scale", "aria-hidden": "true" });
  const made = element("p", { class: "legend" },
    element("span", {}, part.low, scale, `${part.high}: ${part.note}`));
  for (const { text, marks } of part.marks)
    made.append(element("span", { class: ["t", ...marks].join(" ") },
      (marks.includes("verdict") ? "⚑" : "") + text));
  return made;
}

/* --- Items: tokens and cells --- */

/** Give an item its colour. `part` is -1 (low) to 1 (high), or null for no colour. */
function tint(item, part) {
  if (part === null || part === undefined) return;
  item.classList.add("scored");
  item.style.setProperty("--p", part.toFixed(3));
}

/** The text of an item in one line, for screen readers. */
function label(said, more = []) {
  return [said, ...more.map(line => line.text)].join("; ");
}

/** Add keyboard and pointer control to items.
    @param figure the element of the items. This function adds a line that shows an item's numbers.
    @param rows [[{item, said, more}]], in reading order.
    @param beside (row, column, step) -> the target [row, column] of the key arrow up (step -1) or
    arrow down (step 1). null if there is no target. */
function navigable(figure, rows, { key, state }, beside) {
  const told = element("div", { class: "told", "aria-hidden": "true" });
  const places = new Map();
  rows.forEach((row, r) => row.forEach(({ item }, c) => {
    places.set(item, [r, c]);
    item.tabIndex = -1;
  }));
  figure.dataset.key = key;
  figure.append(told);
  if (!places.size) return;
  const inside = (n, count) => Math.max(0, Math.min(count - 1, n));
  let here = null;

  const tell = ([r, c]) => {
    const { said, more = [] } = rows[r][c];
    const lines = more.map(line => {
      const made = element("li", {}, line.text);
      made.style.setProperty("--p", line.part ?? 0);
      return made;
    });
    told.replaceChildren(said, ...(lines.length ? [element("ol", {}, ...lines)] : []));
  };
  const visit = ([r, c]) => {
    if (here) rows[here[0]][here[1]].item.tabIndex = -1;
    here = [inside(r, rows.length), 0];
    here[1] = inside(c, rows[here[0]].length);
    rows[here[0]][here[1]].item.tabIndex = 0;
    state.set(key, here);
    return rows[here[0]][here[1]].item;
  };
  const forth = () => getComputedStyle(places.keys().next().value.parentElement).direction === "rtl"
    ? -1 : 1;
  const to = (event, [r, c]) => ({
    ArrowLeft: () => [r, c - forth()], ArrowRight: () => [r, c + forth()],
    ArrowUp: () => beside(r, c, -1), ArrowDown: () => beside(r, c, 1),
    Home: () => [event.ctrlKey ? 0 : r, 0],
    End: () => [event.ctrlKey ? rows.length - 1 : r, Infinity],
  })[event.key]?.();
  const place = event => {
    const item = event.target.closest("[tabindex]");
    return item && places.get(item);
  };

  visit(state.get(key) ?? [0, 0]);
  figure.addEventListener("keydown", event => {
    const next = place(event) && to(event, place(event));
    if (!next || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    visit(next).focus();
  });
  figure.addEventListener("focusin", event => {
    if (!place(event)) return;
    visit(place(event));
    tell(here);
  });
  figure.addEventListener("pointerover", event => place(event) && tell(place(event)));
  figure.addEventListener("pointerleave", () => {
    if (figure.contains(figure.getRootNode().activeElement)) tell(here);
  });
}

function strip(part, at) {
  const list = element("div",
    { class: "tokens", role: "listbox", dir: "auto", "aria-label": part.caption || "Tokens",
      "aria-orientation": "horizontal" });
  const row = part.items.map(({ text, part: p, said, marks = [] }) => {
    // The line break must come after the frame of the line's last token.
    const end = text.endsWith("\n") ? "\n" : "";
    const seen = end ? text.slice(0, -1) : text;
    const item = element("span", { class: ["t", ...marks].join(" "), role: "option",
      "aria-label": `${seen}: ${said}` });
    if (marks.includes("verdict"))
      item.append(element("span", { class: "flag", "aria-hidden": "true" }, "⚑"));
    item.append(element("span", { class: "text" }, seen));
    tint(item, p);
    list.append(item, end);
    return { item, said };
  });
  const figure = element("figure", {}, ...caption(part), list);
  navigable(figure, row.length ? [row] : [], at, (_, c, step) => [0, lineBeside(row, c, step)]);
  return figure;
}

/** Index of the nearest token on the next line (step 1) or on the line before (step -1). */
function lineBeside(row, from, step) {
  const box = i => row[i].item.getClientRects()[0] ?? row[i].item.getBoundingClientRect();
  const start = box(from);
  let line = null, best = from, distance = Infinity;
  for (let i = from + step; i >= 0 && i < row.length; i += step) {
    const other = box(i);
    if (step * (other.top - start.top) < start.height / 2) continue;
    line ??= other.top;
    if (Math.abs(other.top - line) > start.height / 2) break;
    if (Math.abs(other.left - start.left) < distance) {
      distance = Math.abs(other.left - start.left);
      best = i;
    }
  }
  return best;
}

function caption(part) {
  return part.caption ? [element("figcaption", {}, part.caption)] : [];
}

function grid(part, at) {
  const [down, across] = part.titles;
  const names = part.columns.map(name => element("th", { scope: "col" }, name));
  const top = across && element("tr", {}, element("td", { "aria-hidden": "true" }),
    element("th", { scope: "colgroup", colspan: part.columns.length }, across));
  const head = element("thead", {}, ...(top ? [top] : []),
    element("tr", {}, element("th", { scope: "col" }, down), ...names));
  const rows = part.cells.map((cells, r) => cells.map((cell, c) => {
    const told = cell?.text || "no value";
    const said = [down, part.rows[r]].filter(Boolean).join(" ") + ", " +
      [across, part.columns[c]].filter(Boolean).join(" ") + `: ${told}`;
    const item = element("td", { "aria-label": label(said, cell?.more) }, cell?.text ?? "");
    tint(item, cell?.part);
    return { item, said, more: cell?.more };
  }));
  const body = element("tbody", {}, ...rows.map((row, r) => element("tr", {},
    element("th", { scope: "row" }, part.rows[r]), ...row.map(({ item }) => item))));
  const table = element("table", { role: "grid", "aria-label": part.caption || "Values",
    "aria-readonly": "true" }, head, body);
  const style = `grid${part.tight ? " tight" : ""}${part.words ? " words" : ""}`;
  const figure = element("figure", {}, ...caption(part), element("div", { class: style }, table));
  navigable(figure, rows.filter(row => row.length), at, (r, c, step) => [r + step, c]);
  return figure;
}

/* --- Parts that hold other parts --- */

function section(part, at) {
  const name = [element("b", {}, part.title), part.name ? ` ${part.name}` : "",
    element("span", { class: "facts" }, ` ${part.facts}`)];
  const made = element("details", { class: "feature", id: part.id },
    element("summary", { "data-key": at.key }, ...name));
  // The parts of a closed section are drawn when it opens.
  const fill = () => {
    if (made.open && made.children.length === 1) made.append(...drawn(part.parts, at));
  };
  made.open = at.state.get(at.key) ?? part.open;
  at.state.set(at.key, made.open);
  fill();
  made.addEventListener("toggle", () => {
    at.state.set(at.key, made.open);
    fill();
  });
  return made;
}

function bars(part, at) {
  const row = part.bars.map(({ part: height, above, said }) => {
    const item = element("i", { role: "option", "aria-label": said });
    item.style.setProperty("--p", height);
    item.style.setProperty("--above", above);
    return { item, said };
  });
  const inside = row.map(({ item }) => item);
  if (part.mark) inside.splice(part.mark.at, 0,
    element("b", { class: "mark", title: part.mark.said, "aria-hidden": "true" }));
  const list = element("div", { class: "bars", role: "listbox", "aria-label": part.said,
    "aria-orientation": "horizontal" }, ...inside);
  const figure = element("figure", {}, list, element("figcaption", {}, part.caption));
  navigable(figure, row.length ? [row] : [], at, () => null);
  return figure;
}

/** Several options. The reader chooses one option from a list. */
function choice(part, at) {
  const options = part.options.map((option, i) => element("option", { value: i }, option.name));
  const select = element("select", { "data-key": at.key }, ...options);
  const shown = element("div");
  const show = () => {
    const i = select.selectedIndex;
    shown.replaceChildren(...drawn(part.options[i].parts, { ...at, key: `${at.key}.${i}` }));
  };
  select.selectedIndex = Math.min(at.state.get(at.key) ?? 0, options.length - 1);
  select.addEventListener("change", () => {
    at.state.set(at.key, select.selectedIndex);
    show();
  });
  show();
  return element("div", { class: "choice" }, element("label", {}, part.label, select), shown);
}

function side(part, at) {
  const each = part.options.map((option, i) => element("section", { "aria-label": option.name },
    element("h3", {}, option.name),
    ...drawn(option.parts, { ...at, key: `${at.key}.${i}` })));
  return element("div", { class: "side" }, ...each);
}

/* --- Where views are drawn --- */

/** Draw the views of a saved page. Each view comes after the element with the view's data. */
function drawPage() {
  for (const data of document.querySelectorAll("script.vllm-scope-data")) {
    const root = element("main");
    data.after(root);
    draw(root, JSON.parse(data.textContent), new Map());
  }
}

/** For anywidget: draw the model's `view` now and after each change. */
function render({ model, el }) {
  // JupyterLab then does not use the keys of this element for shortcuts.
  el.dataset.lmSuppressShortcuts = "true";
  const state = new Map();
  const redraw = () => draw(el, model.get("view"), state);
  redraw();
  model.on("change:view", redraw);
  return () => model.off("change:view", redraw);
}

export { draw, drawPage, render };
export default { render };
