"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const count = (n) => n.toLocaleString("en-US");
  const listeners = []; // called with the number of the chosen parameter
  const names = [];
  for (let i = 0; i < (data.names || []).length; i += 2) {
    const module = data.modules[data.names[i]];
    names.push(module ? `${module}.${data.names[i + 1]}` : data.names[i + 1]);
  }
  let chosen = -1;

  /** An element. Texts become text nodes, never markup: names in a checkpoint may hold anything. */
  function make(tag, attributes = {}, ...children) {
    const isDrawn = ["svg", "rect", "text", "title", "g"].includes(tag);
    const node = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name.startsWith("--")) node.style.setProperty(name, value);
      else if (value !== false) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  function choose(number) {
    chosen = number;
    $("said").textContent = `${names[number]} is shown beside the list`;
    for (const listener of listeners) listener(number);
  }

  const lookOf = (number) => data.looks[data.look[number]];

  // ---- The tree of names, and the search -------------------------------------------------------------------------

  const CHUNK = 200;

  function growTree() {
    const root = { below: new Map(), number: -1, total: 0 };
    names.forEach((name, number) => {
      let node = root;
      for (const part of name.split(".")) {
        let next = node.below.get(part);
        if (!next) node.below.set(part, (next = { below: new Map(), number: -1, total: 0 }));
        node = next;
        node.total += 1;
      }
      node.number = number;
    });
    return root;
  }

  /** Nodes below one, as [label, node]; a node with a single one below shares its line. */
  function below(node) {
    return [...node.below].map(([label, next]) => {
      while (next.number < 0 && next.below.size === 1) {
        const [[part, only]] = next.below;
        label += `.${part}`;
        next = only;
      }
      return [label, next];
    });
  }

  function startTree() {
    const tree = $("tree"), search = $("search"), found = $("found");
    let root = null;

    function makeRow(label, remark, level, extra = {}) {
      const row = make("span", { class: "row", "--level": level }, make("span", {}, ...label), make("span", {}, remark));
      return make("li", { role: "treeitem", tabindex: "-1", "aria-level": level + 1, ...extra }, row);
    }

    function makeLeaf(label, number, level) {
      const row = makeRow(label, lookOf(number).label, level, { "aria-selected": String(number === chosen) });
      row.number = number;
      return row;
    }

    function addItems(list, items, makeItem, level, start = 0) {
      for (const item of items.slice(start, start + CHUNK)) list.append(makeItem(item));
      const left = items.length - start - CHUNK;
      if (left <= 0) return;
      const more = makeRow([`Show ${count(Math.min(left, CHUNK))} of ${count(left)} more`], "", level);
      more.act = () => {
        const last = more.previousElementSibling;
        more.remove();
        addItems(list, items, makeItem, level, start + CHUNK);
        focus(last.nextElementSibling);
      };
      list.append(more);
    }

    function makeNode([label, node], level) {
      if (node.number >= 0 && !node.below.size) return makeLeaf([label], node.number, level);
      const row = makeRow([label], count(node.total), level, { "aria-expanded": "false" });
      row.number = node.number;
      row.grow = () => {
        const list = make("ul", { role: "group" });
        if (node.number >= 0) list.append(makeLeaf(["(itself)"], node.number, level + 1));
        addItems(list, below(node), (item) => makeNode(item, level + 1), level + 1);
        row.append(list);
      };
      return row;
    }

    function expand(item, open) {
      if (open && !item.querySelector("ul")) item.grow();
      item.setAttribute("aria-expanded", String(open));
      const list = item.querySelector("ul");
      if (list) list.hidden = !open;
    }

    function focus(item) {
      if (!item) return;
      for (const other of tree.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
      item.tabIndex = 0;
      item.focus();
    }

    function act(item) {
      if (item.act) item.act();
      else if (item.hasAttribute("aria-expanded")) expand(item, item.getAttribute("aria-expanded") !== "true");
      else choose(item.number);
    }

    function visible() {
      return [...tree.querySelectorAll("li")].filter((item) => !item.parentElement.closest("ul[hidden]"));
    }

    function showAll() {
      root = root || growTree();
      const items = below(root);
      tree.replaceChildren();
      addItems(tree, items, (item) => makeNode(item, 0), 0);
      if (items.length === 1 && tree.firstChild.grow) expand(tree.firstChild, true);
      found.textContent = names.length === 1 ? "1 parameter" : `${count(names.length)} parameters`;
    }

    function show() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (!words.length) showAll();
      else {
        const matches = [];
        lowered.forEach((name, number) => words.every((word) => name.includes(word)) && matches.push(number));
        tree.replaceChildren();
        addItems(tree, matches, (number) => makeLeaf(emphasise(names[number], words), number, 0), 0);
        found.textContent = `${count(matches.length)} of ${count(names.length)} match`;
      }
      if (tree.firstElementChild) tree.firstElementChild.tabIndex = 0;
    }

    /** A name with the places marked that match. */
    function emphasise(name, words) {
      const pattern = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
      const parts = name.split(new RegExp(`(${pattern})`, "i"));
      return parts.map((part, place) => (place % 2 ? make("mark", {}, part) : part));
    }

    const lowered = names.map((name) => name.toLowerCase());
    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(show, 60);
    });
    search.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" && event.key !== "Enter") return;
      event.preventDefault();
      clearTimeout(timer);
      show();
      if (event.key === "Enter" && tree.firstElementChild) act(tree.firstElementChild);
      else focus(tree.firstElementChild);
    });
    tree.addEventListener("click", (event) => {
      const item = event.target.closest("li");
      if (!item) return;
      focus(item);
      act(item);
    });
    tree.addEventListener("keydown", (event) => {
      const item = event.target.closest("li");
      if (!item) return;
      const items = visible(), place = items.indexOf(item), open = item.getAttribute("aria-expanded");
      if (event.key === "ArrowDown") focus(items[place + 1]);
      else if (event.key === "ArrowUp") focus(items[place - 1]);
      else if (event.key === "Home") focus(items[0]);
      else if (event.key === "End") focus(items[items.length - 1]);
      else if (event.key === "Enter" || event.key === " ") act(item);
      else if (event.key === "ArrowRight" && open === "false") expand(item, true);
      else if (event.key === "ArrowRight" && open) focus(item.querySelector("li"));
      else if (event.key === "ArrowLeft" && open === "true") expand(item, false);
      else if (event.key === "ArrowLeft") focus(item.parentElement.closest("li"));
      else return;
      event.preventDefault();
    });
    listeners.push((number) => {
      for (const item of tree.querySelectorAll("[aria-selected]")) {
        item.setAttribute("aria-selected", String(item.number === number));
      }
    });
    show();
  }

  // ---- Ranks ------------------------------------------------------------------------------------------------------

  const sides = (data.sides || []).filter((side) => side.profiles.length);

  const countRanks = (axes) => axes.reduce((product, [, parts]) => product * parts, 1);

  function coordsOf(axes, rank) {
    return axes.map(([, parts], place) => Math.floor(rank / countRanks(axes.slice(place + 1))) % parts);
  }

  /** Coordinates of a rank over the first `depth` axes, in words. */
  function nameRank(axes, rank, depth) {
    return coordsOf(axes.slice(0, depth), rank).map((coord, place) => `${axes[place][0]} ${coord}`).join(", ");
  }

  function nameRange(axes, first, last) {
    return last > first ? `${nameRank(axes, first)} to ${nameRank(axes, last)}` : nameRank(axes, first);
  }

  /** What the ranks that hold the same elements have in common, e.g. "tp 1 (4 ranks)". */
  function nameHolders(axes, runs, depth) {
    const ranks = runs.flatMap(([first, number]) => Array.from({ length: number }, (_, step) => first + step));
    if (ranks.length === 1) return nameRank(axes, ranks[0], depth);
    const words = ranks.map((rank) => nameRank(axes, rank, depth).split(", "));
    const common = words[0].filter((word, place) => words.every((other) => other[place] === word));
    return `${common.join(", ")}${common.length ? " (" : ""}${ranks.length} ranks${common.length ? ")" : ""}`;
  }

  function profileOf(side, state, number) {
    const column = side.states[state];
    return column === undefined ? undefined : side.profiles[side.columns[column][number]];
  }

  // ---- The chosen parameter ---------------------------------------------------------------------------------------

  function makeTable(columns, rows) {
    const head = columns.map((text) =>
      make("th", { scope: "col", class: text.startsWith(">") ? "number" : "" }, text.replace(">", "")));
    const body = rows.map((row) => make("tr", {}, ...row.map((cell, place) =>
      make("td", { class: columns[place].startsWith(">") ? "number" : "" }, cell))));
    return make("table", {}, make("tr", {}, ...head), ...body);
  }

  function showParam(number, state) {
    const look = lookOf(number), panel = $("param");
    const facts = look.facts.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]);
    panel.replaceChildren(
      make("h3", {}, names[number]),
      make("dl", {}, ...facts),
      make("div", { class: "scroll" }, makeTable(data.columns, look.rows)),
    );
    if (!sides.length) return;
    const states = Object.keys(look.sizes).filter((name) => sides.some((side) => profileOf(side, name, number)));
    if (!states.length) {
      panel.append(make("p", { class: "quiet" }, "No layout over ranks is recorded for it."));
      return;
    }
    state = states.includes(state) ? state : states[0];
    const select = makeSelect("Layout of", states, state, (name) => {
      showParam(number, name);
      $("param").querySelector("select").focus();
    });
    panel.append(make("p", { class: "controls" }, select), make("div", { class: "figures" },
      ...sides.map((side) => drawLayout(side, profileOf(side, state, number), look.shape))));
  }

  function makeSelect(text, options, value, change) {
    const select = make("select", { onchange: () => change(select.value) }, ...options.map((option) => {
      const [key, label] = Array.isArray(option) ? option : [option, option];
      return make("option", { value: key }, label);
    }));
    select.value = value;
    return make("label", {}, `${text} `, select);
  }

  /** Source or target layout of a tensor: its boxes on the two dims that are cut first. */
  function drawLayout(side, profile, shape) {
    const caption = make("figcaption", {}, make("strong", {}, side.title), make("br"));
    if (!profile) {
      caption.append(side.without);
      return make("figure", {}, caption);
    }
    const mesh = side.meshes[profile.mesh];
    caption.append(...mesh.lines.flatMap((line) => [line, make("br")]));
    const held = profile.runs.map(([first, number, numel]) => [nameRange(mesh.axes, first, first + number - 1), count(numel)]);
    const list = make("details", {}, make("summary", {}, "Elements of each rank"),
      make("div", { tabindex: "0" }, makeTable(["ranks", ">elements of each"], held.slice(0, 1000))));
    if (!profile.boxes) {
      return make("figure", {}, caption, make("p", { class: "quiet" }, "Not drawn: the page holds too many layouts."), list);
    }
    const dims = shape.map((_, dim) => dim);
    const cut = dims.filter((dim) => profile.boxes.some(([, sizes]) => sizes[dim] !== shape[dim]));
    const shown = [...new Set([...cut, ...dims])].slice(0, 2).sort((a, b) => a - b);
    const [rows, columns] = shown.length === 2 ? shown : [undefined, shown[0]];
    const length = (dim) => (dim === undefined ? 1 : shape[dim] || 1);
    const width = 300, ratio = rows === undefined ? 0.2 : length(rows) / length(columns);
    const height = Math.round(width * Math.min(1, Math.max(0.3, ratio)));
    const label = `${side.title}: ${profile.boxes.length} boxes over ${mesh.axes.map((a) => a.join("=")).join(", ")}`;
    const svg = make("svg", { viewBox: `0 0 ${width + 2} ${height + 18}`, role: "img", "aria-label": label });
    for (const [offsets, sizes, runs] of profile.boxes) {
      const along = (dim, pixels) => dim === undefined ? [0, pixels]
        : [offsets[dim] / length(dim) * pixels, sizes[dim] / length(dim) * pixels];
      const [x, w] = along(columns, width), [y, h] = along(rows, height);
      const who = nameHolders(mesh.axes, runs, profile.depth);
      const box = `[${offsets.map((low, dim) => `${low}:${low + sizes[dim]}`).join(", ")}]`;
      const group = make("g", {}, make("title", {}, `${who}: ${box}`),
        make("rect", { x: x + 1, y: y + 1, width: w, height: h, "--hue": (runs[0][0] * 47 + 210) % 360 }));
      if (w > 6.2 * who.length && h > 13) group.append(make("text", { x: x + 6, y: y + Math.min(h / 2 + 4, 15) }, who));
      svg.append(group);
    }
    const sizes = shown.map((dim) => `dim ${dim}: ${count(shape[dim])}`);
    const note = rows === undefined ? `${sizes[0] || "scalar"} →` : `${sizes[0]} ↓   ${sizes[1]} →`;
    const others = cut.length > 2 ? `, cut also along dim ${cut.slice(2).join(", ")}` : "";
    svg.append(make("text", { class: "dim", x: 1, y: height + 15 }, note + others));
    if (profile.note) caption.append(`Drawn: ${profile.note}.`);
    return make("figure", {}, caption, svg, list);
  }

  // ---- Maps -------------------------------------------------------------------------------------------------------

  function colours(...variables) {
    const style = getComputedStyle(document.documentElement);
    return variables.map((name) => {
      const hex = style.getPropertyValue(`--${name}`).trim();
      return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    });
  }

  const cached = (values, key, compute) => (values.has(key) ? values : values.set(key, compute())).get(key);

  const mix = (from, to, share) => from.map((value, at) => Math.round(value + (to[at] - value) * share));

  const GUTTER = 120;

  /**
   * A grid of coloured cells that is read with the mouse or the arrow keys. `grid`: rows, columns, colour(row, column, palette),
   * describe(row, column), act(row, column), rowLabel(row), columnLabels [[column, text]], marked (a column), palette (names).
   */
  function makeMap(place, label, legend) {
    const canvas = make("canvas", { tabindex: "0", role: "application", "aria-label": label, "aria-roledescription": "map" });
    const hint = "Point at a cell, or focus the map and use the arrow keys. A click or Enter chooses.";
    const status = make("p", { role: "status" }, hint);
    const list = make("ul", { class: "legend" }, ...legend.map(([colour, text]) =>
      make("li", {}, make("span", { style: `background:${colour}` }), text)));
    place.classList.add("map");
    place.replaceChildren(canvas, list, status);
    const map = { grid: null, row: 0, column: 0, isActive: false };
    const cellAt = (event) => {
      const box = canvas.getBoundingClientRect(), { rows, columns } = map.grid;
      const column = Math.floor((event.clientX - box.left - GUTTER) / (box.width - GUTTER) * columns);
      const row = Math.floor((event.clientY - box.top) / (box.height - 18) * rows);
      return column >= 0 && column < columns && row >= 0 && row < rows ? [row, column] : null;
    };
    const go = (row, column) => {
      map.row = Math.min(map.grid.rows - 1, Math.max(0, row));
      map.column = Math.min(map.grid.columns - 1, Math.max(0, column));
      map.isActive = true;
      status.textContent = map.grid.describe(map.row, map.column);
      map.draw();
    };
    canvas.addEventListener("mousemove", (event) => {
      const cell = cellAt(event);
      if (cell && (cell[0] !== map.row || cell[1] !== map.column || !map.isActive)) go(...cell);
    });
    canvas.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (cell) map.grid.act(...cell);
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (step) go(map.row + step[0], map.column + step[1]);
      else if (event.key === "Home") go(map.row, 0);
      else if (event.key === "End") go(map.row, map.grid.columns - 1);
      else if (event.key === "Enter" || event.key === " ") map.grid.act(map.row, map.column);
      else return;
      event.preventDefault();
    });
    map.draw = () => {
      const { rows, columns } = map.grid, scale = window.devicePixelRatio || 1;
      const width = canvas.clientWidth || 900, height = Math.min(420, Math.max(90, rows * 18));
      canvas.style.height = `${height + 18}px`;
      canvas.width = width * scale;
      canvas.height = (height + 18) * scale;
      const context = canvas.getContext("2d"), [ink, soft, accent, back] = colours("ink", "soft", "accent", "back").map((c) => `rgb(${c})`);
      if (!map.image) {
        map.image = new OffscreenCanvas(columns, rows);
        const pixels = new ImageData(columns, rows), palette = colours(...map.grid.palette);
        for (let row = 0; row < rows; row += 1) {
          for (let column = 0; column < columns; column += 1) {
            const colour = map.grid.colour(row, column, palette);
            if (colour) pixels.data.set([...colour, 255], 4 * (row * columns + column));
          }
        }
        map.image.getContext("2d").putImageData(pixels, 0, 0);
      }
      const w = (width - GUTTER) / columns, h = height / rows;
      context.scale(scale, scale);
      context.imageSmoothingEnabled = false;
      context.drawImage(map.image, GUTTER, 0, width - GUTTER, height);
      context.fillStyle = back;
      for (let row = 1; row < rows && h > 6; row += 1) context.fillRect(GUTTER, row * h - 0.5, width - GUTTER, 1);
      for (let column = 1; column < columns && w > 6; column += 1) context.fillRect(GUTTER + column * w - 0.5, 0, 1, height);
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = soft;
      const step = Math.ceil(14 / h);
      for (let row = 0; row < rows; row += step) context.fillText(map.grid.rowLabel(row), 0, row * h + Math.max(10, Math.min(h / 2 + 4, 13)), GUTTER - 8);
      let end = 0;
      for (const [column, text] of map.grid.columnLabels) {
        const x = GUTTER + column * w;
        if (x < end) continue;
        context.fillRect(x, height, 1, 4);
        context.fillText(text, x + 3, height + 14);
        end = x + context.measureText(text).width + 14;
      }
      context.lineWidth = 2;
      context.strokeStyle = accent;
      if (map.grid.marked >= 0) context.strokeRect(GUTTER + map.grid.marked * w - 1, 1, Math.max(w, 2) + 2, height - 2);
      if (map.isActive) {
        context.strokeStyle = ink;
        context.strokeRect(GUTTER + map.column * w, map.row * h, Math.max(w, 3), Math.max(h, 3));
      }
    };
    map.show = (grid, note = hint) => {
      const isSame = map.grid && map.grid.rows === grid.rows && map.grid.columns === grid.columns;
      if (!isSame) Object.assign(map, { row: 0, column: 0, isActive: false });
      Object.assign(map, { grid, image: null });
      status.textContent = map.isActive ? grid.describe(map.row, map.column) : note;
      map.draw();
    };
    const redraw = () => map.grid && ((map.image = null), map.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new ResizeObserver(() => map.grid && map.draw()).observe(place);
    return map;
  }

  // ---- Who holds what ---------------------------------------------------------------------------------------------

  const ROWS = 128, COLUMNS = 480;

  function startHolders() {
    const controls = $("holders-controls"), place = $("holders-map");
    if (!sides.length) {
      place.append(make("p", { class: "quiet" }, "The checkpoint records no layout over several ranks."));
      return;
    }
    const map = makeMap(place, "Ranks by parameters", [
      ["var(--back)", "nothing"], ["color-mix(in srgb, var(--low), var(--high) 30%)", "a part"], ["var(--high)", "the full tensor"],
      ["var(--line)", "no layout over these ranks"]]);
    let side = sides[0], state = "", mesh = 0, from = 0, to = names.length;

    /** Meshes of a side that are not part of another. */
    function listMeshes() {
      const distinct = [...new Map(side.meshes.map(({ axes }) => [JSON.stringify(axes), axes])).values()];
      const isIn = (axes, others) => axes.every(([axis, parts]) => others.some((o) => o[0] === axis && o[1] === parts));
      return distinct.filter((axes) => !distinct.some((others) => others.length > axes.length && isIn(axes, others)));
    }

    function update(focused) {
      const states = Object.keys(side.states), meshes = listMeshes();
      state = states.includes(state) ? state : states[0];
      mesh = Math.min(mesh, meshes.length - 1);
      const numbered = (items, text) => items.map((item, number) => [String(number), text(item)]);
      const set = (id, apply) => (value) => {
        apply(value);
        update(id);
      };
      const widgets = [
        makeSelect("State", states, state, set(0, (value) => { state = value; })),
        sides.length > 1 && makeSelect("Side", numbered(sides, (item) => item.title), String(sides.indexOf(side)),
          set(1, (value) => { side = sides[value]; })),
        meshes.length > 1 && makeSelect("Ranks", numbered(meshes, (axes) => axes.map((a) => a.join("=")).join(", ")),
          String(mesh), set(2, (value) => { mesh = Number(value); })),
      ];
      const all = make("button", { type: "button", onclick: () => { [from, to] = [0, names.length]; update(3); } }, "Show all parameters");
      all.disabled = from === 0 && to === names.length;
      controls.replaceChildren(...widgets.filter(Boolean), all);
      if (side.cut_short) controls.append(make("span", {}, "There are more shards than a page looks up; the last parameters are blank."));
      const focusable = [...widgets.map((widget) => widget && widget.querySelector("select")), all][focused];
      if (focusable) focusable.focus();
      map.show(makeGrid(meshes[mesh]), all.disabled ? undefined : `Parameters ${count(from + 1)} to ${count(to)} of ${count(names.length)}`);
    }

    /** Amounts that ranks hold of parameters, with neighbouring ranks and parameters taken together. */
    function makeGrid(axes) {
      const ranks = countRanks(axes);
      const rows = Math.min(ranks, ROWS), columns = Math.min(to - from, COLUMNS);
      const firstRank = (row) => Math.ceil(row * ranks / rows), firstParam = (column) => from + Math.ceil(column * (to - from) / columns);
      const spread = new Map(); // mesh of a profile -> for each of its ranks, [row, number of ranks] that have its coordinates
      const vectors = new Map(); // profile -> elements in each row
      const held = new Float64Array(rows * columns), whole = new Float64Array(columns), known = new Uint8Array(columns), elsewhere = new Uint8Array(columns);

      function spreadRanks(inner) {
        const at = inner.map(([axis, parts]) => axes.findIndex((a) => a[0] === axis && a[1] === parts));
        if (at.includes(-1)) return null;
        const places = Array.from({ length: countRanks(inner) }, () => new Map());
        for (let rank = 0; rank < ranks; rank += 1) {
          const coords = coordsOf(axes, rank), row = Math.floor(rank * rows / ranks);
          const rowsOfRank = places[inner.reduce((index, [, parts], place) => index * parts + coords[at[place]], 0)];
          rowsOfRank.set(row, (rowsOfRank.get(row) || 0) + 1);
        }
        return places.map((rowsOfRank) => [...rowsOfRank]);
      }

      function addUp({ mesh: number, runs }) {
        const places = cached(spread, number, () => spreadRanks(side.meshes[number].axes)), amounts = new Map();
        for (const [first, length, numel] of places ? runs : []) {
          for (let rank = first; rank < first + length; rank += 1) {
            for (const [row, ranksThere] of places[rank]) amounts.set(row, (amounts.get(row) || 0) + numel * ranksThere);
          }
        }
        return places && [...amounts];
      }

      const column = side.columns[side.states[state]];
      for (let number = from; number < to; number += 1) {
        const at = Math.floor((number - from) * columns / (to - from)), profile = column[number];
        if (profile < 0) continue;
        const vector = cached(vectors, profile, () => addUp(side.profiles[profile]));
        (vector ? known : elsewhere)[at] = 1;
        if (!vector) continue;
        whole[at] += lookOf(number).sizes[state] || 0;
        for (const [row, amount] of vector) held[row * columns + at] += amount;
      }
      const span = Math.log2(2 * ranks);
      const share = (row, at) => whole[at] ? held[row * columns + at] / (firstRank(row + 1) - firstRank(row)) / whole[at] : 0;
      const labels = [];
      for (let at = 0, last = ""; at < columns; at += 1) {
        const layer = (names[firstParam(at)].match(/^(?:.*?\.)?(\d+)(?=\.|$)/) || [])[1];
        const text = layer === undefined ? names[firstParam(at)].split(".").slice(-2)[0] : `layer ${layer}`;
        if (text !== last) labels.push([at, text.slice(0, 24)]);
        last = text;
      }
      const params = (at) => [firstParam(at), Math.min(to, firstParam(at + 1))];
      return {
        rows, columns, columnLabels: labels, palette: ["low", "high", "line"],
        marked: chosen >= from && chosen < to ? Math.floor((chosen - from) * columns / (to - from)) : -1,
        rowLabel: (row) => nameRank(axes, firstRank(row)),
        colour: (row, at, [low, high, unknown]) => {
          const part = share(row, at);
          if (!known[at]) return unknown;
          return part > 0 ? mix(low, high, Math.min(1, Math.max(0.08, 1 + Math.log2(part) / span))) : null;
        },
        describe: (row, at) => {
          const [first, stop] = params(at), last = firstRank(row + 1) - 1;
          const who = nameRange(axes, firstRank(row), last);
          const what = stop - first > 1 ? `${names[first]} to ${names[stop - 1]} (${count(stop - first)} parameters)` : names[first];
          const part = share(row, at), amount = held[row * columns + at] / (last + 1 - firstRank(row));
          if (!known[at]) return `${what}: ${elsewhere[at] ? "It lies over other ranks: choose them above." : side.without}`;
          const text = !part ? "holds nothing"
            : `${last > firstRank(row) ? "each holds on average" : "holds"} ${count(Math.round(amount))} elements of ${state}, ${(100 * part).toPrecision(3)} %`;
          return `${who}: ${text}. ${what}`;
        },
        act: (row, at) => {
          const [first, stop] = params(at);
          if (stop - first === 1) choose(first);
          else {
            [from, to] = [first, stop];
            update();
          }
        },
      };
    }

    listeners.push((number) => {
      if (number < from || number >= to) [from, to] = [0, names.length];
      update();
    });
    update();
  }

  // ---- Experts ----------------------------------------------------------------------------------------------------

  function startExperts() {
    const { layers, signal } = data.experts, columns = Math.max(...layers.map((layer) => layer.count));
    const map = makeMap($("experts-map"), "Layers by experts", [["var(--cold)", `1/16 of the layer's median ${signal}, or less`],
      ["var(--middle)", "the median"], ["var(--warm)", "16 times, or more"], ["var(--dead)", "dead"], ["var(--bad)", "not finite"], ["var(--back)", "no such expert"]]);
    const numbers = Array.from({ length: columns }, (_, number) => [number, String(number)]);
    map.show({
      rows: layers.length, columns, marked: -1, columnLabels: numbers, palette: ["cold", "middle", "warm", "dead", "bad"],
      rowLabel: (row) => layers[row].label.replace(/^(.*?)(\d+)\..*$/, "layer $2"),
      colour: (row, column, [cold, middle, warm, dead, bad]) => {
        const cell = layers[row].cells[column];
        if (!cell) return null;
        if (cell[0] === null) return { dead, zero: dead, "not finite": bad }[cell[2]] || warm;
        return mix(middle, cell[0] < 0 ? cold : warm, Math.min(1, Math.abs(cell[0]) / 4));
      },
      describe: (row, column) => {
        const cell = layers[row].cells[column], who = `${layers[row].label}, expert ${column}`;
        if (!cell) return `${who}: not in the checkpoint`;
        const ratio = cell[0] === null ? "" : `, ${(2 ** cell[0]).toPrecision(3)} times the layer's median`;
        return `${who}: ${signal} ${cell[1]}${ratio}${cell[2] ? `, ${cell[2]}` : ""}${cell[3] ? `, ${cell[3]} tokens` : ""}`;
      },
      act: () => {},
    });
  }

  function start() {
    if (names.length) startTree();
    if (names.length) listeners.push((number) => showParam(number));
    if (data.sides && $("holders-map")) startHolders();
    if (data.experts) startExperts();
    if (names.length) choose(Math.max(0, data.look.findIndex((look) => data.looks[look].shape.length > 1)));
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }
  requestAnimationFrame(() => setTimeout(start)); // after the first paint
})();
