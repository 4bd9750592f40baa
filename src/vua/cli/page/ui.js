// The page of `vua ui`. Text from the directory goes into the page as text alone (textContent).
const $ = (id) => document.getElementById(id);
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) sessionStorage.setItem("token", given);
history.replaceState(null, "", location.pathname);
let shown = "";

function make(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function inside(parent, ...children) {
  parent.append(...children);
  return parent;
}

function command([what, text]) {
  const copy = make("button", "copy");
  copy.type = "button";
  copy.ariaLabel = `copy: ${text}`;
  copy.onclick = async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "copied";
    setTimeout(() => { copy.textContent = "copy"; }, 1500);
  };
  return [make("dt", what), inside(make("dd"), make("code", text), " ", copy)];
}

function finding({ level, name, text }) {
  return inside(make("li"), make("strong", name, level), ` ${text}`);
}

function row(one) {
  const chunks = make("td", one.counted, "number less");
  const namespace = inside(make("td", "", "less"), make("code", one.namespace.slice(0, 12)));
  const size = make("td", one.size, "number");
  return inside(make("tr"), make("td", one.model, "model"), namespace, chunks, size,
    make("td", one.used));
}

function say(line, level) {
  if ($("line").textContent !== line) $("line").textContent = line;
  $("line").className = level;
}

function show(seen) {
  say(seen.line, seen.level);
  $("known").hidden = !seen.looked;
  if (!seen.looked) return;
  $("looked").textContent = seen.looked;
  const now = JSON.stringify({ ...seen, looked: "" });
  if (now === shown) return; // a button that was just pressed stays
  shown = now;
  $("directory").textContent = seen.directory;
  $("full").hidden = !seen.usable_nbytes;
  $("full").max = seen.usable_nbytes || 1;
  $("full").value = seen.nbytes;
  const wrong = seen.findings.filter((one) => one.level !== "ok");
  $("wrong").replaceChildren(...wrong.map(finding));
  $("passed").replaceChildren(...seen.findings.filter((one) => one.level === "ok").map(finding));
  const many = seen.more ? `; the ${seen.more} smallest namespaces are not shown` : "";
  $("summary").textContent = seen.summary + many;
  $("namespaces").parentElement.hidden = !seen.namespaces.length;
  $("namespaces").tBodies[0].replaceChildren(...seen.namespaces.map(row));
  $("todo").replaceChildren(...seen.todo.flatMap(command));
}

async function poll() {
  try {
    const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
    const answer = await fetch("api/overview", { headers });
    const seen = await answer.json();
    if (answer.ok) show(seen);
    else say(seen.error, "bad");
  } catch (problem) {
    say(`No answer: is \`vua ui\` still running? (${problem.message})`, "bad");
  }
  setTimeout(poll, 1000);
}

poll();
