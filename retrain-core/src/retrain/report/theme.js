"use strict";
// The theme button of a page. The event `retheme` says that colours may have changed.
(() => {
  const root = document.documentElement, themes = ["system", "light", "dark"], button = document.getElementById("theme");
  const remembered = () => { try { return localStorage.getItem("retrain-theme"); } catch { return null; } };
  const setTheme = (theme, keep) => {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = `Theme: ${theme === "system" ? "as the system" : theme}`;
    button.dataset.now = theme;
    if (keep) try { localStorage.setItem("retrain-theme", theme); } catch { /* no storage for files here */ }
    document.dispatchEvent(new Event("retheme"));
  };
  button.addEventListener("click", () => setTheme(themes[(themes.indexOf(button.dataset.now) + 1) % 3], true));
  setTheme(themes.includes(remembered()) ? remembered() : "system", false);
  for (const [target, name] of [[matchMedia("(prefers-color-scheme: dark)"), "change"], [window, "afterprint"]])
    target.addEventListener(name, () => setTheme(button.dataset.now, false));
})();
