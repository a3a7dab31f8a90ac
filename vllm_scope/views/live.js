/* A page that its server fills: it asks its reader for the keys, and its server for a view's JSON,
   again and again. In the page it stands behind scope.js, which has `element` and `draw`; saved
   pages do not have it. */

/** Draw what a server tells, again and again. The reader types the keys. They stay in this
    function, are sent as headers, and are gone when the page is left.
    @param live where the view's JSON is, relative to the page.
    @param every_s seconds from an answer to the next question.
    @param timeout_s seconds that an answer may take. */
function drawLive(root, { live, every_s, timeout_s }) {
  const field = (name, made) => element("label", {}, name, made);
  const [api, admin] = [0, 1].map(() =>
    element("input", { type: "password", autocomplete: "off", spellcheck: "false" }));
  // Without names and with "post": whatever happens, no key becomes a part of an address.
  const form = element("form", { class: "keys", method: "post" }, field("API key", api),
    field("Operator's key", admin), element("button", {}, "Show"));
  const pause = element("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const when = element("span");
  const bar = element("p", { class: "facts live" }, when, pause);
  const failed = element("p", { class: "failed", role: "alert" });
  const state = new Map();
  let headers = null, timer = 0, turn = 0, held = false, later = null;
  bar.hidden = true;
  root.before(form, failed, bar);

  // A key or a button that is down acts on what is there: nothing is drawn until it is up.
  const hold = down => () => {
    held = down;
    if (!down && later) setTimeout(() => show(later));
  };
  for (const name of ["keydown", "pointerdown"]) addEventListener(name, hold(true), true);
  for (const name of ["keyup", "pointerup", "pointercancel", "blur"])
    addEventListener(name, hold(false), true);
  const show = view => {
    later = held ? view : null;
    if (!held && view && headers) draw(root, view, state);
  };

  /** Ask for the keys again; what they have shown is not shown any more. */
  const refuse = why => {
    headers = later = null;
    turn++;
    failed.textContent = why;
    when.textContent = "";
    form.hidden = false;
    bar.hidden = true;
    root.replaceChildren();
    admin.focus();
  };
  const fetched = async () => {
    const signal = AbortSignal.timeout(1000 * timeout_s);
    const response = await fetch(new URL(live, location.href),
      { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
    const told = await response.json().catch(() => null);
    if (!told) signal.throwIfAborted();
    if (response.ok && told) return { view: told };
    const error = told?.error?.message ?? told?.error ?? "no reason was given";
    return { status: response.status, why: `HTTP ${response.status}: ${error}` };
  };
  const look = async () => {
    const mine = ++turn;
    const answer = await fetched().catch(({ name }) => ({ why: "no answer from the server" +
      (name === "TimeoutError" ? ` within ${timeout_s} s` : "") }));
    if (mine !== turn) return;
    if ([401, 403, 404].includes(answer.status)) return refuse(answer.why);
    const known = when.textContent;
    if (answer.view) {
      show(answer.view);
      when.textContent = `Updated at ${new Date().toLocaleTimeString()}`;
    }
    const then = known ? "what is shown is older." : "asking again.";
    const why = answer.view ? "" : `${answer.why}; ${then}`;
    if (failed.textContent !== why) failed.textContent = why;
    root.classList.toggle("stale", !answer.view);
    form.hidden = true;
    bar.hidden = false;
    if (pause.getAttribute("aria-pressed") === "false") timer = setTimeout(look, 1000 * every_s);
  };
  form.addEventListener("submit", event => {
    event.preventDefault();
    clearTimeout(timer);
    try {
      headers = new Headers({ "X-Scope-Admin-Key": admin.value });
      if (api.value) headers.set("Authorization", `Bearer ${api.value}`);
    } catch {
      return refuse("A key has a character that an HTTP header cannot have.");
    }
    look();
  });
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") === "false";
    pause.setAttribute("aria-pressed", paused);
    clearTimeout(timer);
    if (!paused) look();
  });
}

/** In the place where the page has the address of its data. */
function drawLivePage() {
  const data = document.querySelector("script.vllm-scope-data");
  const root = element("main");
  data.after(root);
  drawLive(root, JSON.parse(data.textContent));
}
