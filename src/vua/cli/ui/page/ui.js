// The page of `vua ui`. Text from the directory goes into the page as text alone (textContent).
const $ = (id) => document.getElementById(id);
const from = new URLSearchParams(location.hash.slice(1)).get("token");
if (from) sessionStorage.setItem("token", from);
history.replaceState(null, "", location.pathname);

const AGES = [["last minute", 60], ["hour", 3600], ["day", 86400], ["week", 604800], ["older", Infinity]];
const COLOURS = ["#ff9d5c", "#ffcf70", "#a8dba8", "#8ec5e8", "#b9bfd0"];
const view = { overview: null, namespace: "", picked: false };

async function ask(path, body) {
  const said = { headers: { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` } };
  if (body) Object.assign(said, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(`api/${path}`, said);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(...cells) {
  const made = make("tr");
  for (const [value, className] of cells) {
    const cell = make("td", value instanceof Node ? undefined : value, className);
    if (value instanceof Node) cell.append(value);
    made.append(cell);
  }
  return made;
}

function button(text, work) {
  const made = make("button", text);
  made.type = "button";
  made.onclick = work;
  return made;
}

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; nbytes >= 1024 && at < 5; at += 1) nbytes /= 1024;
  return `${at ? nbytes.toFixed(1) : nbytes} ${units[at]}`;
}

const count = (number) => (number === null || number === undefined ? "-" : number.toLocaleString("en"));

function ago(seconds) {
  if (!seconds) return "-";
  const age = Math.max(0, view.overview.now_s - seconds);
  const [unit, length] = [["s", 1], ["min", 60], ["h", 3600], ["days", 86400]].findLast((one) => age >= one[1]) || ["s", 1];
  const number = Math.round(age / length);
  return `${number} ${number === 1 && unit === "days" ? "day" : unit} ago`;
}

// One line each for what is wrong with the server and with what was asked: one does not wipe out the other.
const problems = { server: "", asked: "" };

function complain(problem, where = "server") {
  problems[where] = problem;
  const text = [problems.server, problems.asked].filter(Boolean).join(" · ");
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function command(text) {
  const made = make("div", undefined, "command");
  const copy = button("copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "copied";
    setTimeout(() => { copy.textContent = "copy"; }, 1500);
  });
  made.append(make("code", text), copy);
  return made;
}

// A word of a shell, whatever the directory is called.
const quoted = (text) => (/^[\w./:@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// -- what is known of the whole directory -----------------------------------------------------

function chosen() {
  return view.overview.namespaces.find((one) => one.namespace === view.namespace);
}

function told(progress) {
  const { text, done, total, amount, unit } = progress;
  const share = total ? `${Math.floor((100 * done) / total)} %, ` : "";
  return `${share}${text}, ${unit === "B" ? size(amount) : `${count(amount)} ${unit}`}`;
}

function showOverview() {
  const { overview } = view;
  const { usage, progress, namespaces } = overview;
  document.querySelector("main").hidden = false;
  $("directory").textContent = overview.directory;
  complain(overview.problem);
  const first = overview.looked_s === null;
  $("progress").hidden = !first && !progress;
  $("progress").lastElementChild.textContent = progress
    ? `reading names: ${told(progress)}; until then sizes are estimates` : "looking ...";
  const bar = $("progress").firstElementChild;
  if (progress && progress.total) bar.value = progress.done / progress.total;
  const about = usage && !usage.exact ? "about " : "";
  const sum = (name) => namespaces.reduce((all, one) => all + one[name], 0);
  const nbytes = usage ? usage.nbytes : sum("nbytes");
  const known = usage || !first;
  const facts = [["stored", known ? about + size(nbytes) : "..."],
    ["chunks", known ? first ? about + count(usage.chunks) : count(sum("chunks")) : "..."]];
  if (usage) facts.push(["at most", size(usage.limits.max_bytes)], ["free on the disk", size(usage.free_nbytes)]);
  if (overview.saved) facts.push(["today", overview.saved]);
  facts.push(["last look", first ? "-" : ago(overview.looked_s)]);
  $("facts").replaceChildren(...facts.map(([name, value]) => {
    const made = make("div");
    made.append(make("dt", name), make("dd", value));
    return made;
  }));
  $("full").hidden = !usage;
  if (usage) $("full").firstElementChild.style.width = `${Math.min(100, (100 * nbytes) / usage.limits.max_bytes)}%`;
  if ((!chosen() || !view.picked) && namespaces.length) { // the largest, until one is chosen
    const largest = namespaces.reduce((one, other) => (other.nbytes > one.nbytes ? other : one)).namespace;
    view.namespace = largest;
  }
  $("namespaces").tBodies[0].replaceChildren(...namespaces.map((one) => {
    const name = button(one.namespace.slice(0, 12), () => {
      Object.assign(view, { namespace: one.namespace, picked: true });
      showOverview();
    });
    const model = one.description === "ok" ? one.model || "-" : `(${one.description} description)`;
    const made = row([name], [model, "long"], [count(one.chunk_tokens), "n less"], [count(one.chunks), "n less"],
      [size(one.nbytes), "n"], [ago(one.newest_s)]);
    made.ariaSelected = one.namespace === view.namespace;
    return made;
  }));
  $("nothing").hidden = first || namespaces.length > 0;
  if (!$("nothing").hidden && !$("begin").children.length) {
    $("begin").append(command(`vua-vllm serve MODEL --vua-path ${quoted(overview.directory)}`), command(`vua doctor ${quoted(overview.directory)}`));
  }
  showToDo();
  showPins();
  showAges();
  showLooks();
  showVerified();
  $("textual").hidden = !overview.tokenizer;
  for (const one of document.querySelectorAll(".full")) one.hidden = !$("nothing").hidden;
  $("traffic").hidden = !namespaces.length;
}

function showToDo() {
  const { directory, usage } = view.overview;
  const place = quoted(directory);
  const one = chosen();
  const rows = [[usage ? `set the limit (now ${size(usage.limits.max_bytes)}) for all engines` : "set a limit for all engines", `vua gc ${place} --max-bytes 500G --set`],
    ["delete what was not used for 30 days", `vua ttl ${place} 30d && vua gc ${place}`],
    ["find out why a prompt misses", `vua explain ${place} --prompt FILE --model MODELDIR`],
    ["check every file", `vua verify ${place}`]];
  if (one) rows.push([`delete ${one.model || "this namespace"}`, `vua rm ${place} ${one.namespace.slice(0, 12)} --dry-run`]);
  const now = JSON.stringify(rows);
  if ($("todo").dataset.rows === now) return; // a button that was just pressed stays
  $("todo").dataset.rows = now;
  $("todo").tBodies[0].replaceChildren(...rows.map(([what, text]) => row([what], [command(text)])));
}

function showPins() {
  const { pins, pinned } = chosen() || {};
  $("pinned").hidden = !pinned;
  if (!pinned) return;
  const place = quoted(view.overview.directory);
  $("held").textContent = `${count(pinned)} ${pinned === 1 ? "prompt" : "prompts"}`;
  const all = row(["all pins"], [command(`vua pin ${place}`)]);
  const now = JSON.stringify([pins, pinned]);
  if ($("pins").dataset.rows === now) return;
  $("pins").dataset.rows = now;
  $("pins").tBodies[0].replaceChildren(...pins.map((name) => row([`the prompt up to ${name.slice(0, 12)}: release it`], [command(`vua pin ${place} ${name.slice(0, 12)} --remove`)])), all);
}

// One entry of a legend: a square of the colour, and what it stands for.
function shade(colour, text) {
  const made = make("span");
  const square = make("i");
  square.style.background = colour;
  made.append(square, ` ${text}`);
  return made;
}

function showAges() {
  const { ages, chunks } = chosen() || {};
  const parts = (ages || []).map((number, at) => {
    const made = make("div");
    made.style.cssText = `flex: ${number / chunks} 0 0; background: ${COLOURS[at]}; display: ${number ? "block" : "none"}`;
    return made;
  });
  const said = (ages || []).map((number, at) => `${AGES[at][0]}: ${count(number)}`);
  $("lastuse").hidden = !ages;
  $("ages").replaceChildren(...parts);
  $("ages").ariaLabel = `Chunks by last use: ${said.join(", ")}`;
  $("aged").replaceChildren(...said.map((text, at) => shade(COLOURS[at], text)));
}

function showLooks() {
  const looks = view.overview.looks.slice(-120);
  const most = Math.max(1, ...looks.map((one) => one.new + one.used + one.gone));
  const bars = looks.flatMap((one, at) => {
    let top = 120;
    return ["new", "used", "gone"].map((what) => {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const height = (118 * one[what]) / most;
      top -= height;
      Object.entries({ x: 5 * at, y: top, width: 4, height }).forEach(([name, value]) => bar.setAttribute(name, value));
      bar.setAttribute("class", what);
      return bar;
    });
  });
  $("timeline").replaceChildren(...bars);
  const last = looks.at(-1);
  $("rates").textContent = last ? `last look: ${last.new} new, ${last.used} used, ${last.gone} gone` : "no second look yet";
  $("most").textContent = bars.some((bar) => Number(bar.getAttribute("height"))) ? `${count(most)} chunks` : "";
  $("since").textContent = last ? ago(looks[0].at_s) : "";
  $("timeline").ariaLabel = `${$("rates").textContent}; the highest bar has ${count(most)} chunks`;
}

// -- explain, health --------------------------------------------------------------------------

async function explain() {
  const said = { tokens: $("tokens").value, text: $("text").value, salt: $("salt").value };
  let answer;
  try {
    if (!said.tokens.trim() && !said.text.trim()) throw new Error("paste the prompt's token ids first, for example 1 2 3");
    answer = await ask("explain", said);
  } catch (problem) {
    if (problem instanceof TypeError) throw problem;
    const hint = view.overview.tokenizer ? "" : ". To paste text, start `vua ui` with --tokenizer MODELDIR";
    $("answers").replaceChildren(make("p", `${problem.message}${hint}`, "bad"));
    return;
  }
  $("answers").replaceChildren(make("p", `${count(answer.tokens)} tokens`), ...answer.namespaces.flatMap((one) => [
    make("h3", `${one.namespace.slice(0, 12)} ${one.identity ? one.identity.name || one.identity.model : ""}`),
    make("p", one.verdict, one.usable_chunks ? "good" : "mild"),
  ]));
}

async function showHealth() {
  const found = await ask("health");
  const bad = found.find((one) => one.level === "bad");
  $("empty").textContent = bad ? "No engine starts here" : "Nothing is stored here yet";
  $("why").textContent = bad ? bad.text : "";
  $("how").hidden = $("begin").hidden = Boolean(bad);
  $("health").tBodies[0].replaceChildren(...found.map((one) => row([one.level, { ok: "good", note: "mild", bad: "bad" }[one.level]], [one.name], [one.text, "long"])));
}

function showVerified() {
  const { running, progress, problem, finished_s, report } = view.overview.verify;
  $("verify").disabled = running;
  let text = "not verified since this page's server was started";
  const rows = (report ? report.namespaces : []).filter((one) => one.damaged);
  if (report) text = `${ago(finished_s)}: ${report.sound ? "everything is sound" : "damage was found; `vua verify --repair` takes it out of sight"}, ${size(report.namespaces.reduce((all, one) => all + one.nbytes, 0))} read`;
  if (problem) text = problem;
  if (running) text = progress ? told(progress) : "begins ...";
  $("verified").textContent = text;
  $("verified").className = running || !report ? "" : report.sound ? "good" : "bad";
  const place = (one) => one.namespace.slice(0, 12);
  $("damage").tBodies[0].replaceChildren(...rows.flatMap((one) => [
    ...one.problems.slice(0, 10).map((bad) => row([bad.outcome, "bad"], [`${place(one)}/${bad.path}: ${bad.reason}`, "long"])),
    ...one.damaged > 10 ? [row([""], [`${place(one)}: ${count(one.damaged - 10)} more, which \`vua verify\` lists`, "long"])] : []]));
}

// -- the page ---------------------------------------------------------------------------------

async function guarded(work, where = "asked") {
  try {
    await work();
    if (where !== "server") complain("", where); // what the server tells is shown by `showOverview`
    return true;
  } catch (problem) {
    complain(problem instanceof TypeError ? `no answer: is \`vua ui\` still running? (${problem.message})` : problem.message, where);
    return false;
  }
}

async function poll() {
  const well = document.hidden || await guarded(async () => {
    view.overview = await ask("overview");
    showOverview();
  }, "server");
  setTimeout(poll, well ? 1000 : 5000);
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
}

const system = matchMedia("(prefers-color-scheme: dark)");
const kept = () => localStorage.getItem("theme");
theme(kept() ? kept() === "dark" : system.matches);
system.onchange = () => kept() || theme(system.matches);
$("theme").onclick = () => {
  localStorage.setItem("theme", document.documentElement.classList.contains("dark") ? "light" : "dark");
  theme(kept() === "dark");
};
$("explain").onsubmit = (event) => { event.preventDefault(); guarded(explain); };
$("verify").onclick = () => guarded(() => ask("verify", {}));
guarded(showHealth);
poll();
