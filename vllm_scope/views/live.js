/* The script of a live page. The script asks the reader for the keys. Then it repeatedly gets a
   view's JSON from the server, and draws the view. In the page this script comes after scope.js,
   which defines `element` and `draw`. Saved pages do not have this script. */

/** Repeatedly get a view from the server, and draw the view. The reader types the keys. Only this
    function stores the keys, and it sends them as headers.
    @param live the address of the view's JSON, relative to the page.
    @param every_s seconds between an answer and the next request.
    @param timeout_s the timeout of a request, in seconds. */
function drawLive(root, { live, every_s, timeout_s }) {
  const field = (name, made) => element("label", {}, name, made);
  const [api, admin] = [0, 1].map(() =>
    element("input", { type: "password", autocomplete: "off", spellcheck: "false" }));
  // The inputs have no names, and the method is "post". Therefore a key never gets into an address.
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

  // While a key or a button is down, nothing is drawn. The event must reach the current elements.
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

  /** Ask for the keys again, and remove the view that was drawn with the old keys. */
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

/** Draw a live page, after the element with the address of the data. */
function drawLivePage() {
  const data = document.querySelector("script.vllm-scope-data");
  const root = element("main");
  data.after(root);
  drawLive(root, JSON.parse(data.textContent));
}
