// What the theme leaves out for people who use a keyboard or a screen reader: boxes that scroll can be reached, also those
// that the theme makes later, and the search has a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
const reach = () => {
  for (const box of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) {
    if (box.getAttribute("tabindex") !== "0") box.tabIndex = 0;
  }
};
new MutationObserver(reach).observe(document.querySelector("main"), {childList: true, subtree: true, attributeFilter: ["tabindex"]});
reach();
