// Names and focus for parts that the theme adds when a page has loaded.
function name_parts() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((one, number) => {
    one.setAttribute("aria-label", `Code block ${number + 1}`);
  });
  // The label of a section with an overview is an icon; the section's title names it.
  for (const nav of document.querySelectorAll(".md-nav[aria-labelledby]")) {
    const label = document.getElementById(nav.getAttribute("aria-labelledby"));
    const title = nav.querySelector(":scope > .md-nav__title")?.textContent.trim();
    if (label?.textContent.trim() || !title) continue;
    nav.removeAttribute("aria-labelledby");
    nav.setAttribute("aria-label", title);
  }
  for (const one of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0; // the keyboard can scroll it
    else one.removeAttribute("tabindex");
  }
}

// The search reads a leading dash as "without this word". Flags are searched by their name.
document.addEventListener(
  "input",
  (event) => {
    if (!event.target.matches?.(".md-search__input")) return;
    const words = event.target.value.replace(/(^|\s)-+/g, "$1");
    if (words !== event.target.value) event.target.value = words;
  },
  true,
);

const watcher = new MutationObserver(name_parts);
watcher.observe(document.body, { childList: true, subtree: true });
window.addEventListener("resize", name_parts);
name_parts();
