// SPDX-License-Identifier: GPL-2.0
// The pages of mdBook load a script of this name, which Debian's package of mdBook lacks. This script highlights code,
// and lets the reader select a theme.
"use strict";

const themes = document.getElementById("theme-list");
const themeNames = Array.from(themes.querySelectorAll(".theme"), button => button.id);
const darkThemes = ["coal", "navy"];

function applyTheme(name) {
    document.documentElement.classList.remove(...themeNames);
    document.documentElement.classList.add(name);
    document.getElementById("ayu-highlight-css").disabled = name !== "ayu";
    document.getElementById("tomorrow-night-css").disabled = !darkThemes.includes(name);
    document.getElementById("highlight-css").disabled = name === "ayu" || darkThemes.includes(name);
}

// The template of the page sets default_theme and theme.
function selectTheme(name) {
    if (name === "default_theme") {
        localStorage.removeItem("mdbook-theme");
        applyTheme(default_theme);
    } else {
        localStorage.setItem("mdbook-theme", name);
        applyTheme(name);
    }
    themes.style.display = "none";
}

document.getElementById("theme-toggle").addEventListener("click", () => {
    themes.style.display = themes.style.display === "block" ? "none" : "block";
});
themes.addEventListener("click", event => {
    const button = event.target.closest(".theme");
    if (button) {
        selectTheme(button.id);
    }
});
applyTheme(theme);

for (const block of document.querySelectorAll("pre code[class*=language-]")) {
    hljs.highlightBlock(block);
}
