// What the test asks of the page, as one expression.
({
  /** [selector, text, contrast ratio] of every visible text, as the accessibility guidelines count it. */
  contrast(selectors) {
    const numbers = (text) => text.match(/[\d.]+/g).map(Number);
    const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const ground = (element) => {
      for (let e = element; e; e = e.parentElement) {
        const colour = numbers(getComputedStyle(e).backgroundColor);
        if (colour.length < 4 || colour[3] > 0) return colour;
      }
      return [255, 255, 255];
    };
    return selectors.flatMap((selector) => [...document.querySelectorAll(selector)]
      .filter((e) => e.offsetParent && e.textContent.trim() && !e.closest(".unseen, .skip"))
      .map((e) => {
        const pair = [light(numbers(getComputedStyle(e).color)), light(ground(e))].sort((a, b) => b - a);
        return [selector, e.textContent.trim().slice(0, 30), (pair[0] + 0.05) / (pair[1] + 0.05)];
      }));
  },

  /** What reaches over the right edge. */
  outside(width) {
    return [...document.querySelectorAll("main *")]
      .filter((e) => !e.closest(".unseen, thead, svg") && e.getClientRects().length)
      .filter((e) => e.getBoundingClientRect().right > width + 1)
      .map((e) => e.outerHTML.slice(0, 80));
  },

  /** [name, width of its outline, left edge] of what has the focus; null for nothing. */
  focused() {
    const e = document.activeElement;
    if (e === document.body) return null;
    const name = e.id || e.className || e.dataset.span || e.textContent;
    return [name, parseFloat(getComputedStyle(e).outlineWidth), e.getBoundingClientRect().left];
  },

  reachable() {
    return [...document.querySelectorAll("a, button:not([hidden])")].filter((e) => e.getClientRects().length).length;
  },

  nameless() {
    return [...document.querySelectorAll("button, a")].filter((e) => !e.textContent.trim() && !e.ariaLabel).length;
  },

  /** How many different values the chart's pixels have. */
  pixels() {
    const canvas = document.querySelector("#loss-chart canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(data.filter((_, index) => index % 4 < 3)).size;
  },

  colour(selector) {
    return getComputedStyle(document.querySelector(selector)).backgroundColor.match(/[\d.]+/g).map(Number).slice(0, 3);
  },
})
