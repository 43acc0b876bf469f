"""Measurements of the page as a browser shows it, each as a JavaScript expression: contrast of
texts, texts that are cut, and what Tab reaches.
"""

from __future__ import annotations

_SHARED = """
  const shown = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode;
    if (!text.data.trim() || text.parentElement.closest("script, noscript, style")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const boxes = [...range.getClientRects()].filter((box) => box.width && box.height);
    if (boxes.length) shown.push({ element: text.parentElement, text: text.data.trim(), boxes });
  }
"""
_COLOURS = """
  const parsed = (colour) => {
    const found = /^rgba?\\(([\\d., ]+)\\)$/.exec(colour);
    if (!found) throw new Error(`not a plain colour: ${colour}`);
    const [r, g, b, a = 1] = found[1].split(",").map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], under) =>
    [r, g, b].map((part, place) => part * a + under[place] * (1 - a)).concat(1);
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const style = getComputedStyle(each);
      if (style.backgroundImage !== "none" || style.opacity !== "1") {
        throw new Error(`an image or opacity at ${each.outerHTML.slice(0, 200)}`);
      }
      layers.push(parsed(style.backgroundColor));
      if (layers.at(-1)[3] === 1) return layers.reduceRight((under, layer) => over(layer, under));
    }
    throw new Error(`no ground below ${element.outerHTML.slice(0, 200)}`);
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (colour, under) => {
    const [less, more] = [light(over(parsed(colour), under)), light(under)].sort((a, b) => a - b);
    return (more + 0.05) / (less + 0.05);
  };
"""

# WCAG 2.2, 1.4.3: 4.5:1, and 3:1 for text from 24 px, or from 18.66 px if it is bold. What the
# style adds to elements and the placeholder are texts as well. The answer: `checked`, how many
# texts; `moods`, the kinds of pills among them; `pale`, texts with too little contrast.
CONTRAST = f"""(() => {{
  {_SHARED}{_COLOURS}
  const texts = shown.map(({{ element, text }}) => [element, text, getComputedStyle(element)]);
  for (const element of document.body.querySelectorAll("*")) {{
    for (const added of ["::before", "::after"]) {{
      const style = getComputedStyle(element, added);
      const text = style.content.replace(/^"|"$/g, "").trim();
      if (!["", "none", "normal"].includes(text)) texts.push([element, text, style]);
    }}
    if (element.tagName === "INPUT") {{
      texts.push([element, element.placeholder, getComputedStyle(element, "::placeholder")]);
      texts.push([element, `${{element.placeholder}} (typed)`, getComputedStyle(element)]);
    }}
  }}
  const moods = new Set(), pale = [];
  for (const [element, text, style] of texts) {{
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const found = contrast(style.color, ground(element));
    if (element.classList.contains("pill")) moods.add(element.className);
    if (found < (large ? 3 : 4.5)) pale.push(`${{text}}: ${{found.toFixed(2)}}`);
  }}
  return {{ checked: texts.length, moods: [...moods], pale }};
}})()"""

# What sticks out of the screen or out of a box that cuts it, sideways; and upright, where the box
# does not scroll. A placeholder has no box of its own, so its text is measured.
CUT = f"""(() => {{
  {_SHARED}
  const width = document.documentElement.clientWidth, cut = [];
  const scrolled = document.scrollingElement.scrollWidth;
  if (scrolled > width) cut.push(`the page is ${{scrolled}} px wide`);
  for (const {{ element, text, boxes }} of shown) {{
    for (const box of boxes) {{
      if (box.left < 0 || box.right > width) cut.push(`${{text}}: to ${{box.right}} px`);
      for (let each = element; each !== document.body; each = each.parentElement) {{
        const style = getComputedStyle(each), outer = each.getBoundingClientRect();
        if (style.overflowX === "visible" || style.display === "inline") continue;
        if (box.left < outer.left - 1 || box.right > outer.right + 1) cut.push(`${{text}}: aside`);
        const scrolls = ["auto", "scroll"].includes(style.overflowY);
        if (!scrolls && box.bottom > outer.bottom + 1) cut.push(`${{text}}: below`);
      }}
    }}
  }}
  for (const element of document.querySelectorAll("input, button, svg, .pill")) {{
    const box = element.getBoundingClientRect();
    if (box.left < 0 || box.right > width) cut.push(`${{element.outerHTML}}: to ${{box.right}} px`);
  }}
  const pen = document.createElement("canvas").getContext("2d");
  for (const input of document.querySelectorAll("input[placeholder]")) {{
    const style = getComputedStyle(input);
    pen.font = style.font;
    const room =
      input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (pen.measureText(input.placeholder).width > room) cut.push(`${{input.placeholder}}: aside`);
  }}
  return cut;
}})()"""

_NAME = "(each) => each.getAttribute('aria-label') || each.textContent.trim()"
# All that should be reached by Tab, in the order of the document, each with its name and its
# distance from the top of the page (px). They are taken at one moment, because the ages on the page
# change, and a line that wraps moves all below it.
CONTROLS = f"""(() => {{
  const controls = document.querySelectorAll("a[href], button, input, select, textarea, summary");
  return [...controls].map((each) =>
    ({{name: ({_NAME})(each), top: each.getClientRects()[0].top + scrollY}}));
}})()"""
# What has the focus: its name, the thickness of the line around it (px), its contrast with the
# ground, and whether all of it is in view.
FOCUS = f"""(() => {{
  {_COLOURS}
  const element = document.activeElement;
  if (!element || element === document.body) return null;
  const style = getComputedStyle(element), box = element.getClientRects()[0];
  const line = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
  const reach = line + parseFloat(style.outlineOffset);
  let inView = box.top - reach >= 0 && box.bottom + reach <= innerHeight && box.left - reach >= 0;
  for (let each = element.parentElement; each !== document.body; each = each.parentElement) {{
    if (getComputedStyle(each).overflowX === "visible") continue;
    const outer = each.getBoundingClientRect();
    if (box.left - reach < outer.left || box.top - reach < outer.top) inView = false;
  }}
  return {{
    name: ({_NAME})(element), line, inView,
    contrast: contrast(style.outlineColor, ground(element.parentElement)),
  }};
}})()"""
