// Applies the changes of the node to the page, and keeps ages and countdowns current.
"use strict";
(() => {
  const SILENT_MS = 30000, AGAIN_MS = 10000;
  const page = document.body;
  const live = document.getElementById("live");
  let version = page.dataset.version;
  let ahead = Date.now() - Number(page.dataset.now); // of this clock, against the node's
  let source = null, heardAt = 0, again = 0;

  function span(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    if (whole < 120) return `${whole} s`;
    if (whole < 7200) return `${Math.floor(whole / 60)} min`;
    return whole < 172800 ? `${Math.floor(whole / 3600)} h` : `${Math.floor(whole / 86400)} d`;
  }

  function tell() {
    const now = Date.now() - ahead;
    for (const time of document.getElementsByTagName("time")) {
      if (!time.dataset.clock) time.dataset.clock = time.textContent;
      const seconds = (Date.parse(time.dateTime) - now) / 1000;
      const ways = {
        ago: () => `${span(-seconds)} ago`,
        since: () => `${time.dataset.clock} (${span(-seconds)})`,
        until: () => `at ${time.dataset.clock}, ${seconds > 0 ? `in ${span(seconds)}` : "due now"}`,
      };
      const told = ways[time.className]();
      if (time.textContent !== told) time.textContent = told;
      time.title = time.dateTime;
    }
  }

  function arrange(list, ids) {
    const items = new Map();
    for (const item of [...list.children]) {
      if (ids.includes(item.id)) items.set(item.id, item);
      else item.remove();
    }
    ids.forEach((id, place) => {
      const there = list.children[place];
      if (there && there.id === id) return;
      const item = items.get(id) || document.createElement("li");
      item.id = id;
      list.insertBefore(item, there || null);
    });
  }

  function apply(changes) {
    for (const [id, ids] of Object.entries(changes.order || {})) {
      const list = document.getElementById(id);
      if (list) arrange(list, ids);
    }
    for (const [id, content] of Object.entries(changes.set || {})) {
      const part = document.getElementById(id);
      if (!part) continue;
      if (part.tagName === "rect") part.setAttribute("width", content);
      else replace(part, content);
    }
  }

  // The link that takes the place of one with the focus has the focus then.
  function replace(part, content) {
    const focus = document.activeElement;
    const href = part.contains(focus) ? focus.href : "";
    const alike = () => [...part.getElementsByTagName("a")].filter((link) => link.href === href);
    const place = href ? alike().indexOf(focus) : 0;
    part.innerHTML = content; // the server has escaped every text in it
    const links = href ? alike() : [];
    if (links.length) (links[place] || links[0]).focus({ preventScroll: true });
  }

  function show(mood, words) {
    live.className = `pill ${mood}`;
    live.textContent = words;
  }

  function stop() {
    clearTimeout(again);
    if (source) source.close();
    source = null;
  }

  function lost(words, later) {
    stop();
    show("warn", words);
    again = setTimeout(start, later);
  }

  function start() {
    stop();
    if (document.hidden) return;
    heardAt = Date.now();
    source = new EventSource(`stream?have=${encodeURIComponent(version)}`);
    source.onopen = () => show("good", "live");
    source.onmessage = (message) => {
      const { now, changes } = JSON.parse(message.data);
      heardAt = Date.now();
      ahead = heardAt - now;
      version = message.lastEventId;
      apply(changes);
      tell();
    };
    source.addEventListener("full", () => lost("not live: too many viewers", 3 * AGAIN_MS));
    source.onerror = () => {
      if (source && source.readyState === EventSource.CLOSED) lost("not live: trying again", AGAIN_MS);
      else show("warn", "not live: connecting");
    };
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  setInterval(() => {
    tell();
    if (source && Date.now() - heardAt > SILENT_MS) lost("not live: trying again", 0);
  }, 1000);
  tell();
  start();
})();
