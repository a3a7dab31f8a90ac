/* Draws views from JSON: in a notebook (anywidget calls `render`), and in a saved page, which has
   this module, its data, and a call of `drawPage`.

   A view is {parts: [...]}; each part has a `kind`, the name of a function in DRAW, and the fields
   that vllm_scope/views/parts.py lists. Every text becomes a text node or an attribute, never
   markup.

   Keys: Tab goes from one strip or grid to the next; the arrow keys, Home and End go from item to
   item within a strip or grid. The numbers of the item that has the focus, or is under the pointer,
   are shown below. */

const DRAW = { text, heading, legend, strip, grid, section, bars, choice, side };

/** Draw a view into an element, in place of the element's children. `state` is a Map, empty before
    the first drawing. It keeps, from one drawing to the next, which item of a part has the focus
    and what is open. */
function draw(root, view, state) {
  const active = root.getRootNode().activeElement;
  const focused = active && root.contains(active) ? active.closest("[data-key]")?.dataset.key : null;
  const scrolled = [...root.querySelectorAll("div.grid")].map(grid => grid.scrollLeft);
  root.classList.add("vllm-scope");
  root.replaceChildren(...drawn(view.parts ?? [], { key: "", state }));
  root.querySelectorAll("div.grid").forEach((grid, i) => { grid.scrollLeft = scrolled[i] ?? 0; });
  const there = focused && root.querySelector(`[data-key="${CSS.escape(focused)}"]`);
  // The page stays where the reader has scrolled it.
  if (there) (there.querySelector('[tabindex="0"]') ?? there).focus({ preventScroll: true });
}

/** The elements of some parts. A part's key is its kind and place: "side0.1.strip2" is the third
    part of the second option of the first part. Because a key has the kind, the state of a strip is
    never used for a grid in the same place. A section has its id as its place, because other
    sections may come and go before it. */
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

/** What an item says in one line, for screen readers. */
function label(said, more = []) {
  return [said, ...more.map(line => line.text)].join("; ");
}

/** Let the keyboard and the pointer move over items.
    @param figure the element of the items; gets a line below, which shows an item's numbers.
    @param rows [[{item, said, more}]], in the order of reading.
    @param beside (row, column, step) -> the [row, column] to which the key arrow up (step -1) or
    arrow down (1) leads; null if it leads nowhere. */
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
    // The line break comes after the frame of the line's last token.
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

/** Index of the token that is nearest on the next line (step 1) or on the line before (-1). */
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

/** One of several options, which the reader chooses from a list. */
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

/** Draw the views of a saved page, each after the element that has its data. */
function drawPage() {
  for (const data of document.querySelectorAll("script.vllm-scope-data")) {
    const root = element("main");
    data.after(root);
    draw(root, JSON.parse(data.textContent), new Map());
  }
}

/** For anywidget: draw the model's `view`, and again whenever it changes. */
function render({ model, el }) {
  // With this, JupyterLab does not use the keys of this element for its shortcuts.
  el.dataset.lmSuppressShortcuts = "true";
  const state = new Map();
  const redraw = () => draw(el, model.get("view"), state);
  redraw();
  model.on("change:view", redraw);
  return () => model.off("change:view", redraw);
}

export { draw, drawPage, render };
export default { render };
