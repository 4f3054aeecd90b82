// What is on the page can be read without this. It adds: choosing a figure and a case, and the values under the pointer
// or, with the keyboard, at the places of the axis.
"use strict";
(() => {
  document.documentElement.classList.add("js");

  const choice = (section, name, options, chosen) => {
    const label = document.createElement("label");
    label.append(name + " ");
    const select = document.createElement("select");
    for (const o of options) select.add(new Option(o));
    select.addEventListener("change", () => chosen(select.selectedIndex));
    label.append(select);
    section.querySelector(".controls").append(label);
  };

  for (const section of document.querySelectorAll(".experiment")) {
    const figures = [...section.querySelectorAll(".figure")];
    const cases = (f) => [...f.querySelectorAll(".chart")];
    if (figures.length > 1) {
      choice(section, "Figure", figures.map((f) => f.dataset.name), (i) => {
        figures.forEach((f, j) => f.classList.toggle("chosen", i === j));
      });
    }
    const names = figures.length ? cases(figures[0]).map((c) => c.dataset.case) : [];
    if (names.length > 2) {
      choice(section, "Case", ["all", ...names], (i) => {
        for (const f of figures) {
          for (const c of cases(f)) c.classList.toggle("away", i > 0 && c.dataset.case !== names[i - 1]);
        }
      });
    }
  }

  // Each plot says the values of one place: all marks with the same data-at, that are not hidden.
  for (const plot of document.querySelectorAll(".plot")) {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    const live = document.createElement("p");
    live.className = "sr";
    live.setAttribute("aria-live", "polite");
    plot.append(tip, live);
    for (const picture of plot.querySelectorAll(".picture")) prepare(plot, picture, tip, live);
  }

  function prepare(plot, picture, tip, live) {
    const rows = picture.querySelector(".name") !== null;
    const places = new Map();
    for (const mark of picture.querySelectorAll(".mark")) {
      const title = mark.querySelector("title");
      const [x, y] = mark.getAttribute("transform").match(/[\d.]+/g).map(Number);
      const at = mark.dataset.at;
      if (!places.has(at)) places.set(at, []);
      places.get(at).push({ mark, x, y, says: title.textContent });
      title.remove(); // or the browser would show it besides
    }
    picture.querySelector("title").remove();
    picture.removeAttribute("aria-labelledby");
    picture.setAttribute("aria-label", plot.parentElement.querySelector("figcaption").textContent);
    picture.setAttribute("aria-description", picture.querySelector("desc").textContent + " Arrow keys tell the values.");
    picture.setAttribute("tabindex", "0");

    const keys = [...places.keys()].sort((a, b) => key(a) - key(b));
    function key(at) { const m = places.get(at)[0]; return rows ? m.y : m.x; }
    const seen = (m) => !m.mark.closest(".series") || getComputedStyle(m.mark.closest(".series")).visibility !== "hidden";
    let current = -1;

    function show(i, say) {
      const marks = places.get(keys[i]).filter(seen).sort((a, b) => a.y - b.y);
      if (!marks.length) return hide();
      current = i;
      const head = document.createElement("b");
      head.textContent = rows ? "" : keys[i];
      const list = document.createElement("ul");
      for (const m of marks) {
        const item = document.createElement("li");
        item.textContent = m.says;
        list.append(item);
      }
      tip.replaceChildren(head, list);
      tip.hidden = false;
      place(marks[0]);
      if (say) live.textContent = (rows ? "" : keys[i] + ". ") + marks.map((m) => m.says).join(". ");
    }

    // place puts the tip beside a mark, inside of the window.
    function place(m) {
      const box = picture.getBoundingClientRect();
      const scale = box.width / picture.viewBox.baseVal.width;
      const wide = document.documentElement.clientWidth;
      const leftmost = 8 - box.left;
      const x = Math.max(leftmost, Math.min(m.x * scale + 14, wide - box.left - tip.offsetWidth - 8));
      tip.style.left = x + "px";
      tip.style.top = (rows ? m.y * scale + 14 : box.height - 30 * scale) + "px";
    }

    function hide() { tip.hidden = true; current = -1; }

    picture.addEventListener("pointermove", (e) => {
      const box = picture.getBoundingClientRect();
      const scale = picture.viewBox.baseVal.width / box.width;
      const at = rows ? (e.clientY - box.top) * scale : (e.clientX - box.left) * scale;
      let best = 0;
      keys.forEach((k, i) => { if (Math.abs(key(k) - at) < Math.abs(key(keys[best]) - at)) best = i; });
      if (keys.length && best !== current) show(best, false);
    });
    picture.addEventListener("pointerleave", hide);
    picture.addEventListener("blur", hide);
    picture.addEventListener("keydown", (e) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      if (e.key === "Escape") return hide();
      if (!step || !keys.length) return;
      e.preventDefault();
      show((current + step + keys.length) % keys.length, true);
    });
  }
})();
