"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const draw = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const plain = (n) => n.toLocaleString("en");
  const bytes = (n) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (Math.abs(n) < 1024) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
      n /= 1024;
    }
    return `${n.toFixed(1)} GiB`;
  };
  const seconds = (s) => (s === 0 ? "" : s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(1)} ms` : `${(s * 1e6).toFixed(1)} µs`);
  const flops = (n) => {
    for (const unit of ["", " k", " M", " G", " T"]) {
      if (n < 1000) return n === 0 ? "" : `${unit ? n.toFixed(1) : n}${unit}`;
      n /= 1000;
    }
    return `${n.toFixed(1)} P`;
  };
  const short = (operator) => operator.replace(/^aten::/, "");
  const place = (row) => {
    const cell = make("td", { class: "place" }, make("span", { class: "source" }, row.source || "unknown"));
    if (row.code) cell.append(make("code", {}, row.code));
    return cell;
  };

  // A table whose headings sort: `show(order)` shows its rows.
  const sortable = (table, first, show) => {
    const state = { by: first, down: true };
    const headings = [...table.querySelectorAll("th[data-sort]")];
    const again = () => {
      for (const h of headings) {
        if (h.dataset.sort === state.by) h.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        else h.removeAttribute("aria-sort");
      }
      const sign = state.down ? -1 : 1;
      show((a, b) => {
        const [x, y] = [a[state.by] ?? "", b[state.by] ?? ""];
        return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
      });
    };
    for (const h of headings) {
      h.tabIndex = 0;
      const choose = () => {
        state.down = state.by === h.dataset.sort ? !state.down : !h.classList.contains("text");
        state.by = h.dataset.sort;
        again();
      };
      h.addEventListener("click", choose);
      h.addEventListener("keydown", (e) => { if (e.key === "Enter") choose(); });
    }
    return again;
  };

  // --- modules -------------------------------------------------------------------------------------------------------
  const SUMS = ["seconds", "flops", "bytes", "made", "count"];
  const known = ["forward", "prefill", "decode", "backward", "optimizer"];
  const phases = [...new Set(data.rows.map((row) => row.phase))].sort((a, b) => known.indexOf(a) - known.indexOf(b));
  at("module-phase").append(...phases.map((phase) => make("option", { value: phase }, phase)));
  const treeOf = (phase) => {
    const fresh = (name, type, path) => ({ name, type, path, children: new Map(), seconds: 0, flops: 0, bytes: 0, made: 0, count: 0 });
    const root = fresh("everything", "", "");
    for (const row of data.rows) {
      if (phase && row.phase !== phase) continue;
      let node = root;
      const modules = row.modules.length ? row.modules : [[`(${row.phase === "optimizer" ? "optimizer" : "outside of modules"})`, ""]];
      for (const kind of SUMS) node[kind] += row[kind];
      for (const [path, type] of modules) {
        let child = node.children.get(path);
        if (!child) {
          const name = path === "" ? type || "model" : path.startsWith(node.path + ".") && node.path ? path.slice(node.path.length + 1) : path;
          child = fresh(name, path === "" ? "" : type, path);
          child.key = `${node.key || ""}/${path}`;
          node.children.set(path, child);
        }
        node = child;
        for (const kind of SUMS) node[kind] += row[kind];
      }
    }
    return root;
  };
  const unfolded = new Set(["/"]);
  const showModules = sortable(at("module-table"), "seconds", (order) => {
    const root = treeOf(at("module-phase").value);
    const wanted = at("module-search").value.trim().toLowerCase();
    const found = (node) => `${node.path} ${node.name} ${node.type}`.toLowerCase().includes(wanted) || [...node.children.values()].some(found);
    const body = at("module-table").tBodies[0];
    body.replaceChildren();
    const add = (node, depth) => {
      if (wanted && !found(node)) return;
      const open = wanted || unfolded.has(node.key);
      const name = make("td", { class: "tree" });
      name.style.setProperty("--depth", depth);
      if (node.children.size) {
        const button = make("button", { type: "button", "aria-expanded": Boolean(open), "aria-label": `fold ${node.name}` }, open ? "▾" : "▸");
        button.addEventListener("click", () => {
          if (!unfolded.delete(node.key)) unfolded.add(node.key);
          showModules();
        });
        name.append(button);
      } else name.append(make("span", { class: "leaf" }));
      name.append(node.name);
      if (node.type) name.append(" ", make("span", { class: "dim" }, node.type));
      const share = root.seconds ? (100 * node.seconds) / root.seconds : 0;
      const bar = make("i");
      bar.style.width = `${share}%`;
      body.append(make("tr", {}, name, make("td", {}, seconds(node.seconds)), make("td", { class: "bar", title: `${share.toFixed(1)} %` }, bar),
        make("td", {}, flops(node.flops)), make("td", {}, bytes(node.bytes)), make("td", {}, bytes(node.made)), make("td", {}, plain(node.count))));
      if (open) [...node.children.values()].sort(order).forEach((child) => add(child, depth + 1));
    };
    [...root.children.values()].sort(order).forEach((child) => add(child, 0));
  });
  at("module-search").addEventListener("input", showModules);
  at("module-phase").addEventListener("change", showModules);
  at("module-all").addEventListener("click", () => {
    const every = [];
    const walk = (node) => node.children.forEach((child) => { every.push(child.key); walk(child); });
    walk(treeOf(""));
    const all = every.every((key) => unfolded.has(key));
    unfolded.clear();
    if (!all) every.forEach((key) => unfolded.add(key));
    at("module-all").textContent = all ? "Unfold all" : "Fold all";
    showModules();
  });

  // --- operators -----------------------------------------------------------------------------------------------------
  const MOST = 400;
  for (const row of data.rows) {
    row.module = row.modules.length ? row.modules[row.modules.length - 1][0] : "";
    row.rate = row.seconds && row.flops ? row.flops / row.seconds / 1e9 : 0;
  }
  const showOperators = sortable(at("operator-table"), "seconds", (order) => {
    const wanted = at("operator-search").value.trim().toLowerCase();
    const rows = data.rows.filter((row) => `${row.operator} ${row.module} ${row.phase} ${row.pattern || ""} ${row.source} ${row.code}`.toLowerCase().includes(wanted)).sort(order);
    const body = at("operator-table").tBodies[0];
    body.replaceChildren(...rows.slice(0, MOST).map((row) => {
      const name = make("td", { class: "text" }, short(row.operator));
      const beside = [...new Set([row.phase, row.pattern, row.compiled ? "compiled" : ""])].filter(Boolean).join(", ");
      name.append(" ", make("span", { class: "dim" }, beside));
      return make("tr", {}, name, make("td", {}, seconds(row.seconds)), make("td", { class: "minor" }, plain(row.count)),
        make("td", { class: "minor" }, row.rate ? row.rate.toFixed(1) : ""), make("td", { class: "minor" }, bytes(row.bytes)), make("td", { class: "text module minor" }, row.module), place(row));
    }));
    at("operator-more").textContent = rows.length > MOST ? `${plain(rows.length - MOST)} more rows are not shown; search for them.` : "";
  });
  at("operator-search").addEventListener("input", showOperators);

  // --- graph ---------------------------------------------------------------------------------------------------------
  const DRAWN = 700; // boxes; laying out more takes too long
  const titles = data.programs.map((p, i) => make("option", { value: i }, `${p.title}, ${plain(p.runs)} runs, ${seconds(p.seconds) || "0 s"}`));
  at("graph-program").append(...titles);
  at("memory-program").append(...titles.map((option) => option.cloneNode(true)));
  const view = { open: new Set(), hits: new Set(), box: null, size: null };

  const layout = (program) => {
    const graph = new dagre.graphlib.Graph({ compound: true });
    graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26, marginx: 12, marginy: 12 });
    graph.setDefaultEdgeLabel(() => ({}));
    const counts = new Map();
    const taken = new Map();
    for (const node of program.nodes) {
      for (const group of node.chain) {
        counts.set(group, (counts.get(group) || 0) + 1);
        taken.set(group, (taken.get(group) || 0) + node.seconds);
      }
    }
    const shown = program.nodes.map((node, index) => {
      for (const group of node.chain) if (!view.open.has(group)) return `g${group}`;
      return `n${index}`;
    });
    if (new Set(shown).size > DRAWN) return null;
    const width = (text) => Math.min(260, Math.max(56, 7.2 * text.length + 20));
    program.nodes.forEach((node, index) => {
      const id = shown[index];
      let parent;
      for (const group of node.chain) {
        const own = `g${group}`;
        const [kind, name, type] = program.groups[group];
        const label = kind === "module" ? (name === "" ? type : name) : name + (type ? ` (${type})` : "");
        if (!graph.hasNode(own)) {
          const open = own !== id;
          const beside = kind === "module" && name !== "" ? type : "";
          const size = open ? {} : { width: width(label.length + 2 > beside.length ? `▸ ${label}` : beside), height: beside ? 48 : 36 };
          graph.setNode(own, { kind, label, beside, group, open, note: `${plain(counts.get(group))} operations, ${seconds(taken.get(group)) || "not timed"}`, ...size });
          if (parent !== undefined) graph.setParent(own, parent);
        }
        if (own === id) return;
        parent = own;
      }
      const label = short(node.operator);
      const shape = node.shape ? `[${node.shape.join(", ")}]` : "";
      graph.setNode(id, { kind: "operator", label, beside: shape, width: width(label.length > shape.length ? label : shape), height: 40,
        note: `${node.operator} ${shape}\n${node.source}\n${seconds(node.seconds)}${node.compiled ? `\ncompiled with the ${node.compiled - 1} behind it` : ""}` });
      if (parent !== undefined) graph.setParent(id, parent);
    });
    for (const [from, to] of program.edges) if (shown[from] !== shown[to]) graph.setEdge(shown[from], shown[to]);
    dagre.layout(graph);
    return graph;
  };

  const cut = (text, width) => (7 * text.length > width - 10 ? `${text.slice(0, Math.max(3, Math.floor((width - 18) / 7)))}…` : text);
  const showGraph = (keep) => {
    const program = data.programs[Number(at("graph-program").value)];
    const root = at("graph-view");
    if (!program || !program.nodes.length) {
      root.replaceChildren();
      at("graph-note").textContent = program ? "This program is too large to be drawn." : "No program was timed.";
      return;
    }
    const graph = layout(program);
    if (!graph) {
      at("graph-note").textContent = "That would be too many boxes to draw: fold something first.";
      return false;
    }
    const content = draw("g");
    const edges = graph.edges().map((e) => {
      const points = graph.edge(e).points;
      const middle = points.slice(1).map((p, i) => `${(points[i].x + p.x) / 2},${(points[i].y + p.y) / 2}`);
      const path = `M${points[0].x},${points[0].y} L${middle[0]} ` + points.slice(1, -1).map((p, i) => `Q${p.x},${p.y} ${middle[i + 1]} `).join("") + `L${points.at(-1).x},${points.at(-1).y}`;
      return draw("path", { class: "edge", d: path, "marker-end": "url(#arrow)" });
    });
    const depth = (id) => (graph.parent(id) === undefined ? 0 : 1 + depth(graph.parent(id)));
    const boxes = [];
    for (const id of graph.nodes().sort((a, b) => depth(a) - depth(b))) {
      const node = graph.node(id);
      const [x, y] = [node.x - node.width / 2, node.y - node.height / 2];
      const box = draw("g", { class: `group ${node.kind}` }, draw("title", {}, `${node.label}\n${node.note}`));
      box.append(draw("rect", { x, y, width: node.width, height: node.height, rx: 6 }));
      if (node.open) box.append(draw("text", { x: x + 8, y: y + 14, class: "dim" }, cut(`▾ ${node.label}`, node.width)));
      else {
        const line = draw("text", { x: node.x, y: node.y + (node.beside ? -2 : 4), "text-anchor": "middle" }, cut(node.kind === "operator" ? node.label : `▸ ${node.label}`, node.width));
        box.append(line);
        if (node.beside) box.append(draw("text", { x: node.x, y: node.y + 13, class: "dim", "text-anchor": "middle" }, cut(node.beside, node.width)));
      }
      if (view.hits.has(id)) box.classList.add("hit");
      if (node.group !== undefined) box.addEventListener("click", () => {
        if (view.moved) return;
        const was = view.open.has(node.group);
        was ? view.open.delete(node.group) : view.open.add(node.group);
        if (showGraph() === false) view.open.delete(node.group);
      });
      boxes.push(box);
    }
    content.append(...boxes, ...edges);
    const arrow = draw("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }, draw("path", { d: "M0,0 L8,4 L0,8 z", class: "head" }));
    arrow.firstChild.style.fill = "var(--dim)";
    const { width, height } = graph.graph();
    view.size = { width, height };
    if (!keep || !view.box) fit();
    root.replaceChildren(draw("svg", { preserveAspectRatio: "xMidYMin meet" }, draw("defs", {}, arrow), content));
    position();
    at("graph-note").textContent = "Click a group to unfold it, its title to fold it again. Drag to move, Ctrl and wheel to zoom.";
    return true;
  };
  const fit = () => {
    const { clientWidth, clientHeight } = at("graph-view");
    const scale = Math.max(0.5, Math.min(1.1, clientWidth / view.size.width, clientHeight / view.size.height));
    const width = clientWidth / scale;
    view.box = { x: (view.size.width - width) / 2, y: 0, width, height: clientHeight / scale };
  };
  const position = () => {
    const svg = at("graph-view").querySelector("svg");
    if (svg) svg.setAttribute("viewBox", `${view.box.x} ${view.box.y} ${view.box.width} ${view.box.height}`);
  };
  const openFirst = () => {
    view.open.clear();
    const program = data.programs[Number(at("graph-program").value)];
    if (!program) return;
    // The outermost groups are unfolded as long as few boxes come of it.
    for (let level = 0; level < 3; level++) {
      const more = new Set();
      for (const node of program.nodes) if (node.chain.slice(0, level).every((group) => view.open.has(group)) && node.chain.length > level + 1) more.add(node.chain[level]);
      const inner = new Set(program.nodes.map((node) => node.chain.find((group) => !view.open.has(group) && !more.has(group))));
      if (inner.size > 14) break;
      more.forEach((group) => view.open.add(group));
    }
  };
  at("graph-program").addEventListener("change", () => { view.box = null; openFirst(); showGraph(); });
  at("graph-fold").addEventListener("click", () => { view.open.clear(); view.hits.clear(); showGraph(); });
  at("graph-fit").addEventListener("click", () => { if (view.size) { fit(); position(); } });
  at("graph-search").addEventListener("input", () => {
    const wanted = at("graph-search").value.trim().toLowerCase();
    const program = data.programs[Number(at("graph-program").value)];
    view.hits.clear();
    if (wanted && program) {
      let left = 12; // groups are unfolded for the first of them
      program.nodes.forEach((node, index) => {
        const text = `${node.operator} ${node.source} ${node.chain.map((group) => program.groups[group].join(" ")).slice(-1)}`.toLowerCase();
        if (!text.includes(wanted)) return;
        view.hits.add(`n${index}`);
        if (left-- > 0) node.chain.forEach((group) => view.open.add(group));
        else { const folded = node.chain.find((group) => !view.open.has(group)); if (folded !== undefined) view.hits.add(`g${folded}`); }
      });
    }
    showGraph();
    if (wanted) at("graph-note").textContent = `${plain([...view.hits].filter((id) => id[0] === "n").length)} operations found.`;
  });
  {
    const root = at("graph-view");
    let from = null;
    root.addEventListener("pointerdown", (e) => { from = { x: e.clientX, y: e.clientY, box: { ...view.box } }; view.moved = false; });
    window.addEventListener("pointermove", (e) => {
      if (!from || !view.box) return;
      const [dx, dy] = [e.clientX - from.x, e.clientY - from.y];
      if (Math.abs(dx) + Math.abs(dy) > 5) view.moved = true;
      const scale = from.box.width / root.clientWidth;
      view.box = { ...from.box, x: from.box.x - dx * scale, y: from.box.y - dy * scale };
      position();
    });
    window.addEventListener("pointerup", () => { from = null; });
    root.addEventListener("wheel", (e) => {
      if (!e.ctrlKey || !view.box) return;
      e.preventDefault();
      const factor = Math.exp(e.deltaY * 0.0015);
      const bounds = root.getBoundingClientRect();
      const [px, py] = [(e.clientX - bounds.left) / bounds.width, (e.clientY - bounds.top) / bounds.height];
      view.box = { x: view.box.x + view.box.width * (1 - factor) * px, y: view.box.y + view.box.height * (1 - factor) * py, width: view.box.width * factor, height: view.box.height * factor };
      position();
    }, { passive: false });
    root.addEventListener("keydown", (e) => {
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
      if (!steps || !view.box) return;
      e.preventDefault();
      view.box.x += steps[0] * view.box.width * 0.1;
      view.box.y += steps[1] * view.box.height * 0.1;
      position();
    });
  }

  // --- memory --------------------------------------------------------------------------------------------------------
  const sizes = (root) => {
    const width = Math.max(300, root.clientWidth);
    return { width, height: width < 500 ? 240 : 280, left: 64, right: 12, top: 14, bottom: 34 };
  };
  let showAlive = () => {};
  const showMemory = () => {
    const program = data.programs[Number(at("memory-program").value)];
    const root = at("memory-chart");
    root.replaceChildren();
    if (!program) { at("memory-note").textContent = "No program was timed."; return; }
    const s = sizes(root);
    const top = Math.max(1, ...program.timeline);
    const x = (i) => s.left + ((s.width - s.left - s.right) * i) / Math.max(1, program.timeline.length - 1);
    const y = (n) => s.height - s.bottom - ((s.height - s.top - s.bottom) * n) / top;
    const svg = draw("svg", { viewBox: `0 0 ${s.width} ${s.height}`, role: "img", "aria-label": "Bytes held over the operations of the program" });
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(draw("line", { class: "axis", x1: s.left, x2: s.width - s.right, y1: y(part * top), y2: y(part * top) }));
      svg.append(draw("text", { class: "dim", x: s.left - 6, y: y(part * top) + 4, "text-anchor": "end" }, bytes(Math.round(part * top))));
    }
    const steps = program.timeline.map((n, i) => `${i ? "H" + x(i) + "V" : "L" + x(0) + ","}${y(n)}`).join("");
    svg.append(draw("path", { class: "area", d: `M${x(0)},${y(0)}${steps}V${y(0)}Z` }));
    svg.append(draw("line", { class: "peak", x1: x(program.peak), x2: x(program.peak), y1: s.top, y2: y(0) }));
    const last = program.timeline.length - 1;
    svg.append(draw("text", { class: "dim", x: s.left, y: s.height - 12 }, "first operation"));
    svg.append(draw("text", { class: "dim", x: s.width - s.right, y: s.height - 12, "text-anchor": "end" }, `operation ${plain(last + 1)}`));
    root.append(svg);
    at("memory-note").textContent = `${bytes(top)} at operation ${plain(program.peak + 1)}: what the program makes, as it was recorded, without its inputs.` + (program.more ? ` ${bytes(program.more)} are of smaller tensors than those listed.` : "");
    showAlive();
  };
  showAlive = sortable(at("memory-table"), "bytes", (order) => {
    const program = data.programs[Number(at("memory-program").value)];
    const rows = program ? [...program.alive].sort(order) : [];
    at("memory-table").tBodies[0].replaceChildren(...rows.map((row) => {
      const name = make("td", { class: "text" }, short(row.operator), " ", make("span", { class: "dim" }, [row.role, row.phase].filter(Boolean).join(", ")));
      return make("tr", {}, make("td", {}, bytes(row.bytes)), name, make("td", { class: "text module minor" }, row.module || ""), place(row));
    }));
  });
  at("memory-program").addEventListener("change", showMemory);

  // --- roofline ------------------------------------------------------------------------------------------------------
  const showRoofline = () => {
    const root = at("roofline-chart");
    root.replaceChildren();
    const s = { ...sizes(root) };
    s.height = s.width < 500 ? 280 : 380;
    const dots = data.rows.filter((row) => row.flops && row.bytes && row.seconds && !row.compiled)
      .map((row) => ({ row, x: row.flops / row.bytes, y: row.flops / row.seconds }));
    if (!dots.length) { root.append(make("p", { class: "empty" }, "No operator that computes was timed.")); return; }
    const { flops: peak, bandwidth } = data.machine;
    const span = (values, low, high) => [Math.floor(Math.log10(Math.min(low, ...values))), Math.ceil(Math.log10(Math.max(high, ...values)))];
    const [x0, x1] = span(dots.map((d) => d.x), peak / bandwidth, 4 * peak / bandwidth);
    const [y0, y1] = span(dots.map((d) => d.y), peak, peak);
    const x = (v) => s.left + ((s.width - s.left - s.right) * (Math.log10(v) - x0)) / (x1 - x0);
    const y = (v) => s.height - s.bottom - ((s.height - s.top - s.bottom) * (Math.log10(v) - y0)) / (y1 - y0);
    const svg = draw("svg", { viewBox: `0 0 ${s.width} ${s.height}`, role: "img", "aria-label": "FLOP/s over FLOPs a byte, by operator" });
    for (let e = y0; e <= y1; e++) {
      svg.append(draw("line", { class: "axis", x1: s.left, x2: s.width - s.right, y1: y(10 ** e), y2: y(10 ** e) }));
      svg.append(draw("text", { class: "dim", x: s.left - 6, y: y(10 ** e) + 4, "text-anchor": "end" }, flops(10 ** e).replace(".0", "") || "1"));
    }
    for (let e = x0; e <= x1; e++) svg.append(draw("text", { class: "dim", x: x(10 ** e), y: s.height - 18, "text-anchor": "middle" }, 10 ** e >= 1 ? plain(10 ** e) : (10 ** e).toFixed(-e)));
    svg.append(draw("text", { class: "dim", x: s.width - s.right, y: s.height - 3, "text-anchor": "end" }, "FLOPs a byte"));
    svg.append(draw("text", { class: "dim", x: 2, y: 10 }, "FLOP/s"));
    const ridge = peak / bandwidth;
    const from = Math.max(10 ** x0, 10 ** y0 / bandwidth);
    svg.append(draw("path", { class: "roof", d: `M${x(from)},${y(from * bandwidth)}L${x(ridge)},${y(peak)}H${s.width - s.right}` }));
    const longest = Math.max(...dots.map((d) => d.row.seconds));
    for (const d of dots.sort((a, b) => b.row.seconds - a.row.seconds)) {
      const phase = ["forward", "backward", "optimizer"].includes(d.row.phase) ? d.row.phase : "other";
      const share = (100 * d.y) / Math.min(peak, d.x * bandwidth);
      const text = `${d.row.operator} (${d.row.phase})\n${d.row.module}\n${d.row.source}\n${flops(d.y)}FLOP/s, ${share.toFixed(0)} % of the roof\n${seconds(d.row.seconds)}`;
      svg.append(draw("circle", { class: `dot ${phase}`, cx: x(d.x), cy: y(d.y), r: 2.5 + 9 * Math.sqrt(d.row.seconds / longest) }, draw("title", {}, text)));
    }
    const key = make("p", { class: "sub" });
    for (const phase of ["forward", "backward", "optimizer"]) {
      const dot = draw("svg", { viewBox: "0 0 10 10", class: "key" }, draw("circle", { class: `dot ${phase}`, cx: 5, cy: 5, r: 4 }));
      dot.setAttribute("style", "display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .9em");
      key.append(dot, phase);
    }
    root.append(svg, key);
  };

  showModules();
  showOperators();
  openFirst();
  showGraph();
  showMemory();
  showRoofline();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    showMemory();
    showRoofline();
    if (view.size) { fit(); position(); }
  });
})();
