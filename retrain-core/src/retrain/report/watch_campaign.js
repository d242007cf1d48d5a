"use strict";
(() => {
  const setup = JSON.parse(document.getElementById("page-setup").textContent), trouble = document.getElementById("trouble");
  let last = "";
  const look = async () => {
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const found = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("runs");
      const shown = document.getElementById("runs"), focused = document.activeElement.getAttribute("href");
      if (found.innerHTML !== last) {
        last = found.innerHTML;
        shown.replaceWith(found);
        if (focused) [...found.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
      }
      trouble.hidden = true;
      document.documentElement.dataset.looks = Number(document.documentElement.dataset.looks || 0) + 1;
    } catch (error) {
      trouble.textContent = `Nothing new: ${error.message}. Is \`retrain watch\` still running?`;
      trouble.hidden = false;
    }
    setTimeout(look, (document.hidden ? 8 : 1) * setup.every_ms);
  };
  look();
})();
