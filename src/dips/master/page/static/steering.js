// Pauses and resumes rounds, if the master's settings allow it.

import { byId, say } from "./dom.js";

const ANSWER_MS = 20000; // the master answers within 10 s, or says that it cannot

export function prepareSteering() {
  byId("pause").addEventListener("click", () => {
    byId("reason").value = "";
    byId("pausing").showModal();
  });
  byId("pause-not").addEventListener("click", () => byId("pausing").close());
  byId("pause-now").addEventListener("click", pause);
  byId("reason").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the focus goes back to the button, which would take the same key as a click
    pause();
  });
  byId("resume").addEventListener("click", () => ask("resume", ""));
}

function pause() {
  byId("pausing").close();
  ask("pause", byId("reason").value);
}

export function showSteering(state) {
  byId("steering").hidden = !state.steers || state.run.stopped;
  byId("pause").hidden = state.run.paused;
  byId("resume").hidden = !state.run.paused;
  say(byId("looks"), state.steers ? "For everything else:" : "This page is read-only. To steer:");
}

async function ask(action, reason) {
  say(byId("steered"), "asked …");
  try {
    const answer = await fetch("/steer", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ action, reason }),
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    const text = answer.headers.get("Content-Type")?.startsWith("application/json") ? (await answer.json()).sentence : await answer.text();
    say(byId("steered"), text);
  } catch {
    say(byId("steered"), "the master does not answer; as far as is known, nothing was changed");
  }
}
