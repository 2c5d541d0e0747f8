/** The places of the parts of the flow graph: tasks in columns by how many tasks come before them. Nothing is drawn here. */

const CHIP = 21; // the height of a field with its distance
const BOX = 94; // the height of a task
const ABOVE = 26; // between two tasks of a column; a mark may be above one
const PASS = 12; // the height that an edge takes in a column that it passes
const QUEUE = 68;
const CHIPS = 4; // fields that a task shows

/** The edges between tasks: from the one that puts a field to the one that takes it. `tasks` is in the order of the flow. */
function edgesOf(tasks, fields) {
  const place = new Map(tasks.map((task, at) => [task.name, at]));
  const edges = new Map();
  for (const field of fields) {
    for (const from of field.put_by) {
      for (const to of field.taken_by) {
        if (place.has(from) && place.has(to) && place.get(from) < place.get(to)) {
          edges.set(`${place.get(from)} ${place.get(to)}`, { from: place.get(from), to: place.get(to) });
        }
      }
    }
  }
  return [...edges.values()];
}

function depthsOf(number, edges) {
  const depths = Array(number).fill(0);
  const sorted = [...edges].sort((a, b) => a.from - b.from);
  for (const { from, to } of sorted) depths[to] = Math.max(depths[to], depths[from] + 1);
  return depths;
}

/** The fields that are shown at a task; what is beyond them is counted. */
function chipsOf(task) {
  if (task.puts.length <= CHIPS) return task.puts.map((name) => ({ name }));
  const shown = task.puts.slice(0, CHIPS - 1).map((name) => ({ name }));
  return [...shown, { name: "", more: task.puts.slice(CHIPS - 1) }];
}

/** Order each column by the places of the nodes before it, so that few edges cross. */
function order(columns, nodes) {
  const position = new Map();
  columns[0]?.forEach((node, at) => position.set(node, at));
  for (const column of columns.slice(1)) {
    const mean = (node) => {
      const before = nodes[node].before.filter((each) => position.has(each));
      return before.length ? before.reduce((sum, each) => sum + position.get(each), 0) / before.length : 0;
    };
    const weights = new Map(column.map((node) => [node, mean(node)]));
    // An edge that passes a column goes between the tasks of the column.
    column.sort((a, b) => weights.get(a) - weights.get(b) || a - b);
    const passing = column.filter((node) => nodes[node].task === null);
    const standing = column.filter((node) => nodes[node].task !== null);
    if (passing.length) standing.splice(Math.ceil(standing.length / 2), 0, ...passing);
    column.splice(0, column.length, ...standing);
    column.forEach((node, at) => position.set(node, at / Math.max(1, column.length - 1 || 1)));
  }
}

/** Nodes of tasks, and of edges that pass columns, by column. */
function layered(tasks, edges) {
  const depths = depthsOf(tasks.length, edges);
  const nodes = tasks.map((task, at) => ({ task: at, column: depths[at], before: [] }));
  const paths = edges.map((edge) => {
    const path = [edge.from];
    for (let column = depths[edge.from] + 1; column < depths[edge.to]; column += 1) {
      nodes.push({ task: null, column, before: [path[path.length - 1]] });
      path.push(nodes.length - 1);
    }
    nodes[edge.to].before.push(path[path.length - 1]);
    return { ...edge, path: [...path, edge.to] };
  });
  const columns = Array.from({ length: Math.max(...depths, 0) + 1 }, () => []);
  nodes.forEach((node, at) => columns[node.column].push(at));
  order(columns, nodes);
  return { nodes, paths, columns };
}

const curve = (x1, y1, x2, y2) => `C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
const arch = (x1, y1, x2, y2) => `C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`;

/** Where each edge touches its tasks: the edges of one task are next to each other, in the order of their other ends. */
function spread(paths, end, other, step) {
  const offsets = new Map();
  const groups = new Map();
  for (const path of paths) groups.set(path[end], [...(groups.get(path[end]) ?? []), path]);
  for (const group of groups.values()) {
    group.sort((a, b) => other(a) - other(b));
    group.forEach((path, at) => offsets.set(path, step * (at - (group.length - 1) / 2)));
  }
  return offsets;
}

/** Columns from left to right. */
function wide(tasks, edges, width) {
  const { nodes, paths, columns } = layered(tasks, edges);
  const chips = tasks.map(chipsOf);
  const putting = columns.map((column) => column.some((node) => nodes[node].task !== null && chips[nodes[node].task].length));
  const beside = columns.length * 124 + putting.filter(Boolean).length * 112 + (columns.length - 1) * 84 <= width - 4;
  const [box, chip] = [124, 108];
  const extent = columns.map((_, at) => box + (beside && putting[at] ? 4 + chip : 0));
  const sum = extent.reduce((total, each) => total + each, 0);
  const gap = columns.length > 1 ? Math.max(78, (width - 4 - sum) / (columns.length - 1)) : 0;
  const heightOf = (node) => {
    if (node.task === null) return PASS;
    const fields = chips[node.task].length ? chips[node.task].length * CHIP + 14 : 0;
    return beside ? Math.max(BOX, fields) : BOX + fields + (fields ? 4 : 0);
  };
  const heights = columns.map((column) => column.reduce((total, at) => total + heightOf(nodes[at]) + ABOVE, -ABOVE));
  const height = Math.max(...heights, BOX) + 24;
  let x = 2;
  columns.forEach((column, number) => {
    let y = 16 + (height - 24 - heights[number]) / 2;
    for (const at of column) {
      const node = nodes[at];
      const own = heightOf(node);
      Object.assign(node, { x, y, middle: y + (beside || node.task === null ? own / 2 : BOX / 2), bottom: y + own, extent: extent[number] });
      y += own + ABOVE;
    }
    x += extent[number] + gap;
  });
  const boxes = nodes.filter((node) => node.task !== null).map((node) => {
    const fields = chips[node.task];
    const y = node.middle - BOX / 2;
    const top = beside ? node.middle - (fields.length * CHIP) / 2 - 4 : y + BOX + 4;
    const left = beside ? node.x + box + 4 : node.x + (box - chip) / 2;
    const spots = fields.map((field, at) => ({ ...field, x: left, y: top + at * CHIP, width: chip }));
    return { task: node.task, x: node.x, y, width: box, height: BOX, column: node.column, foot: beside ? y + BOX : node.bottom,
      chips: spots, rateAt: { x: left + chip / 2, y: top + fields.length * CHIP + 11 } };
  });
  const leaves = spread(paths, "from", (path) => nodes[path.path[1]].middle, 9);
  const enters = spread(paths, "to", (path) => nodes[path.path[path.path.length - 2]].middle, 15);
  const lines = paths.map((path) => {
    const source = nodes[path.from];
    const begin = source.x + (beside && chips[path.from].length ? box + 4 + chip : box);
    let [px, py] = [begin, source.middle + leaves.get(path)];
    let line = `M${px} ${py}`;
    for (const at of path.path.slice(1, -1)) {
      line += `${curve(px, py, nodes[at].x, nodes[at].middle)}H${nodes[at].x + nodes[at].extent}`;
      [px, py] = [nodes[at].x + nodes[at].extent, nodes[at].middle];
    }
    return { from: path.from, to: path.to, line: line + curve(px, py, nodes[path.to].x, nodes[path.to].middle + enters.get(path)) };
  });
  const queues = boxes.map((each) => ({ task: each.task, x: each.x - Math.min(gap, QUEUE + 16) / 2, y: each.y + BOX / 2 }));
  return { boxes, lines, queues, width: Math.max(width, x - gap + 2), height: height + 14, vertical: false };
}

/** Rows from top to bottom, at most two tasks in each. */
function tall(tasks, edges, width) {
  const depths = depthsOf(tasks.length, edges);
  const half = Math.min(150, (width - 14) / 2);
  const rows = [];
  Array.from({ length: Math.max(...depths, 0) + 1 }, (_, depth) => tasks.map((_, at) => at).filter((at) => depths[at] === depth))
    .forEach((tier) => { for (let at = 0; at < tier.length; at += 2) rows.push(tier.slice(at, at + 2)); });
  const boxes = [];
  let y = 4;
  for (const row of rows) {
    if (row.some((at) => tasks[at].takes.length)) y += 66; // for the queues
    let lowest = y + BOX;
    row.forEach((task, place) => {
      const alone = row.length === 1;
      const x = alone ? (width - 150) / 2 : place ? width - half - 2 : 2;
      const own = alone ? 150 : half;
      const fields = chipsOf(tasks[task]);
      const chip = alone ? Math.min(112, (width - 12) / 2) : Math.min(own, 130);
      const spots = fields.map((field, at) => {
        const [column, line] = alone && fields.length > 1 ? [at % 2, at >> 1] : [0, at];
        const left = alone && fields.length > 1 ? width / 2 - chip - 4 + column * (chip + 8) : x + (own - chip) / 2;
        return { ...field, x: left, y: y + BOX + 6 + line * CHIP, width: chip };
      });
      const bottom = fields.length ? spots[spots.length - 1].y + CHIP + 12 : y + BOX;
      boxes.push({ task, x, y, width: own, height: BOX, column: depths[task], bottom, chips: spots, rateAt: { x: x + own / 2, y: bottom - 1 } });
      lowest = Math.max(lowest, bottom);
    });
    y = lowest + 8;
  }
  const of = new Map(boxes.map((box) => [box.task, box]));
  const middle = (box) => box.x + box.width / 2;
  const lines = edges.map(({ from, to }) => {
    const [a, b] = [of.get(from), of.get(to)];
    return { from, to, line: `M${middle(a)} ${a.bottom + 3}${arch(middle(a), a.bottom + 3, middle(b), b.y)}` };
  });
  const queues = boxes.map((box) => ({ task: box.task, x: middle(box), y: box.y - 41 }));
  return { boxes, lines, queues, width, height: y + 4, vertical: true };
}

/**
 * Place the tasks, their fields, the edges and the queues.
 * @param {object[]} tasks In the order of the flow. @param {object[]} fields @param {number} width In CSS pixels.
 */
export function layOut(tasks, fields, width) {
  const edges = edgesOf(tasks, fields);
  return width < 620 ? tall(tasks, edges, width) : wide(tasks, edges, width);
}
