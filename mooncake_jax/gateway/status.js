// SPDX-License-Identifier: Apache-2.0
'use strict';
const POLL_MS = 1000, LANES = 64;
const PHASES = ['queue', 'fetch', 'prefill', 'transfer', 'decode'];
const ENDS = {completed: 'good', running: 'prefill', rejected: 'bad',
  rejected_late: 'fetch', failed: 'transfer', cancelled: 'queue'};
const at = id => document.getElementById(id);
const words = s => ({ttft: 'TTFT', tbt: 'TBT'})[s] ?? s.replace(/_/g, ' ');
const many = (n, what) => `${count(n)} ${what}${n === 1 ? '' : 's'}`;
const sum = values => values.reduce((a, b) => a + b, 0);

function node(tag, attributes = {}, ...children) {
  const svg = ['svg', 'g', 'rect', 'line', 'text', 'title', 'path'];
  const made = svg.includes(tag)
    ? document.createElementNS('http://www.w3.org/2000/svg', tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    name === 'css' ? Object.assign(made.style, value)
      : made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const fill = (id, ...children) => at(id).replaceChildren(...children);
const color = name => `var(--${name})`;

function digits(x) {
  return x >= 100 ? x.toFixed(0) : String(Number(x.toPrecision(x < 10 ? 2 : 3)));
}
function seconds(s) {
  if (s == null) return '–';
  if (s >= 120) return `${digits(s / 60)} min`;
  return s >= 1 ? `${digits(s)} s` : `${digits(s * 1e3)} ms`;
}
function count(n) {
  for (const [unit, size] of [['G', 1e9], ['M', 1e6], ['k', 1e4]])
    if (n >= size) return digits(unit === 'k' ? n / 1e3 : n / size) + unit;
  return String(Math.round(n));
}
function bytes(n) {
  let unit = 0;
  for (; n >= 1000 && unit < 5; n /= 1024) unit++;
  return `${unit ? digits(n) : n} ${['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}`;
}
const percent = x => x == null ? '–' : `${digits(100 * x)} %`;

const hitRate = ({hit_rate_by_tier: tiers}) =>
  tiers && sum(Object.values(tiers));

function drawTiles(s) {
  const {recent, fleet} = s, rate = n => s.span_s > 0 ? n / s.span_s : 0;
  const tile = (name, value, unit = '') => node('div', {},
    node('dt', {}, name), node('dd', {}, value, node('small', {}, unit)));
  fill('tiles',
    tile('Running', count(s.running)),
    fleet ? tile('Waiting for prefill', count(fleet.prefill.queued)) : '',
    tile('Requests', digits(rate(recent.offered)), '/s'),
    tile('Output', count(rate(recent.output_tokens)), 'tokens/s'),
    tile('Within the SLO', percent(recent.effective_request_capacity)),
    tile('Prompt reused', percent(hitRate(recent))));
}

function drawHistogram(id, limit_s, values, stats, share) {
  const width = at(id).clientWidth || 400, height = 96, bins = 36;
  const known = values.filter(v => v != null && v > 0);
  let low = Math.log(Math.min(limit_s, ...known) / 1.5);
  let high = Math.log(Math.max(limit_s, ...known) * 1.5);
  // The limit lies between two bars.
  const wide = (high - low) / bins, limit = Math.log(limit_s);
  low = limit - Math.ceil((limit - low) / wide) * wide;
  high = low + bins * wide;
  const x = v => (Math.log(v) - low) / (high - low) * width;
  const counts = Array(bins).fill(0);
  for (const v of known) counts[Math.min(bins - 1, Math.floor(x(v) / width * bins))]++;
  const most = Math.max(1, ...counts), step = width / bins;
  const bars = counts.map((n, i) => n ? node('rect', {
    class: `bar ${(i + .5) * step < x(limit_s) ? 'in' : 'out'}`, rx: 1.5,
    x: i * step + 1, width: step - 2, y: 78 - 66 * n / most,
    height: 66 * n / most}) : '').filter(Boolean);
  const ticks = [];
  for (let power = -5; power < 5; power++) for (const lead of [1, 2, 5]) {
    const v = lead * 10 ** power, left = x(v);
    if (left > 20 && left < width - 20) ticks.push(node('text',
      {x: left, y: 93, 'text-anchor': 'middle'}, seconds(v)));
  }
  const side = x(limit_s) > width / 2 ? 'end' : 'start';
  const label = `${many(known.length, 'request')}, half within ${seconds(stats.p50)}, ` +
    `99 % within ${seconds(stats.p99)}; the limit is ${seconds(limit_s)}`;
  fill(id, node('svg', {height, role: 'img', 'aria-label': label}, ...bars,
    node('line', {x1: 0, x2: width, y1: 78.5, y2: 78.5, class: 'grid'}), ...ticks,
    node('line', {x1: x(limit_s), x2: x(limit_s), y1: 2, y2: 78, class: 'slo'}),
    node('text', {x: x(limit_s) + (side === 'end' ? -6 : 6), y: 11,
      'text-anchor': side}, `SLO ${seconds(limit_s)}`)));
  const fact = (k, v) => node('div', {}, node('dt', {}, k), node('dd', {}, v));
  fill(`${id}-facts`, fact('P50', seconds(stats.p50)), fact('P90',
    seconds(stats.p90)), fact('P99', seconds(stats.p99)),
    fact('kept by', percent(share)));
}

function drawStack(id, parts, label) {
  const total = sum(parts.map(part => part.size));
  fill(id, ...parts.map(part => node('div', {css: {
    flexGrow: part.size / (total || 1), background: color(part.color)}})));
  at(id).setAttribute('aria-label', `${label}: ` + parts.map(
    part => `${part.name} ${part.text}`).join(', '));
  fill(`${id}-key`, ...parts.map(part => node('li', {},
    node('i', {css: {background: color(part.color)}}),
    `${part.name} `, node('span', {class: 'soft'}, part.text))));
}
function drawShares(s) {
  const {recent} = s, tiers = Object.entries(recent.hit_rate_by_tier ?? {});
  if (recent.hit_rate_by_tier) tiers.push(['computed', 1 - hitRate(recent)]);
  drawStack('hits', tiers.map(([tier, share]) => ({name: words(tier),
    color: tier, size: share, text: percent(share)})), 'Prompt tokens');
  drawStack('ends', Object.entries(recent.outcomes).map(([end, n]) => (
    {name: words(end), color: ENDS[end], size: n, text: String(n)})), 'Ends');
  const reasons = Object.entries(recent.rejection_reasons);
  at('reasons').textContent = reasons.length ? 'Rejected for ' + reasons.map(
    ([why, n]) => `${words(why)} (${n})`).join(', ') : 'None was rejected.';
}

function meter(name, text, value, most, closed, label) {
  const share = most > 0 ? Math.min(value / most, 1) : 0;
  return node('li', closed ? {class: 'closed'} : {},
    node('div', {class: 'name'}, node('span', {}, name),
      node('span', {class: 'soft'}, text)),
    node('div', {class: share >= 1 ? 'meter full' : 'meter', role: 'meter',
      'aria-label': label, 'aria-valuemin': 0, 'aria-valuemax': most,
      'aria-valuenow': Math.min(value, most), 'aria-valuetext': text},
    node('div', {css: {width: percentCss(share)}})));
}
const percentCss = share => `${(100 * share).toFixed(1)}%`;

function drawFleet({fleet, slo}) {
  for (const part of document.querySelectorAll('.fleet')) part.hidden = !fleet;
  if (!fleet) return;
  const {prefill, decode, store} = fleet;
  const listed = role => role.instances > role.busiest.length
    ? `, the ${role.busiest.length} busiest of them here` : '';
  at('prefill-sum').textContent = many(prefill.instances, 'instance') +
    `${listed(prefill)}; ${many(prefill.queued, 'request')} queued, the longest queue is ` +
    `${seconds(prefill.queue_s)}. A full bar is the SLO of TTFT.`;
  fill('prefill', ...prefill.busiest.map(each => meter(each.name,
    `${each.queued} · ${seconds(each.queue_s)}`, each.queue_s, slo.ttft_s,
    !each.open, `queue of ${each.name}`)));
  at('decode-sum').textContent = many(decode.instances, 'instance') +
    `${listed(decode)}; ${many(decode.rows, 'row')}. A bar is the KVCache room taken.`;
  fill('decode', ...decode.busiest.map(each => meter(each.name,
    `${each.rows} of ${each.max_batch} rows`, each.used_tokens,
    each.room_tokens, !each.open, `KVCache room of ${each.name}`)));
  fill('store', ...store.map(each => meter(each.medium,
    `${bytes(each.used_bytes)} of ${bytes(each.capacity_bytes)}`,
    each.used_bytes, each.capacity_bytes, false,
    `${each.medium}, ${many(each.blocks, 'block')}`)));
}

let picked = null, shownLives = [];
const reused = life => sum(Object.values(life.reused_tokens));
const about = life => [`${life.id}: ${words(life.outcome)}` +
  (life.reason && life.reason !== life.outcome ? `, ${words(life.reason)}` : ''),
  `prompt ${count(life.prompt_tokens)} (${count(reused(life))} reused)`,
  `output ${count(life.output_tokens)}`, `TTFT ${seconds(life.ttft_s)}`,
  `TBT ${seconds(life.tbt_s)}`, life.prefill ? `${life.prefill} → ${life.decode}`
    : '', life.spans.map(([what, start, stop]) =>
    `${what} ${seconds(stop - start)}`).join(', ')].filter(Boolean).join(' · ');

function drawLives(s) {
  const span = Number(at('window').value), now = s.now_s, from = now - span;
  const width = at('lanes').clientWidth || 900, free = [];
  const x = t => Math.max(0, (t - from) / span * width);
  shownLives = s.requests.filter(life => (life.end_s ?? now) >= from);
  let undrawn = 0;
  const lanes = shownLives.map(life => {
    if (!life.spans.length) return -1; // refused
    const start = life.spans[0][1];
    let lane = free.findIndex(t => t <= start);
    if (lane < 0) lane = free.length;
    if (lane >= LANES) { undrawn++; return null; }
    // A gap of two pixels keeps neighbours apart.
    free[lane] = (life.end_s ?? now) + 2 * span / width;
    return lane;
  });
  const tall = free.length > 26 ? 7 : 13;
  const drawn = shownLives.flatMap((life, i) => {
    if (lanes[i] == null) return [];
    const top = 16 + lanes[i] * tall, stop = life.end_s ?? now;
    const marks = life.spans.filter(([, , end]) => end >= from).map(
      ([what, begin, end]) => node('rect', {x: x(begin), y: top + 1, rx: 2,
        width: Math.max(x(end) - x(begin), .8), height: tall - 2,
        fill: color(what)}));
    if (life.end_s != null && life.outcome !== 'completed') {
      const [y, height] = lanes[i] < 0 ? [1, 11] : [top, tall];
      marks.push(node('rect', {x: x(stop) - 1, y, width: 2.5, height,
        fill: color('bad')}));
    }
    const g = node('g', {id: `life-${life.id}`, role: 'option', 'aria-label':
      about(life), 'aria-selected': life.id === picked,
      class: life.id === picked ? 'picked' : ''}, ...marks);
    g.addEventListener('click', () => pick(life.id));
    return [g];
  });
  const height = 20 + Math.max(free.length, 4) * tall + 18;
  const ticks = [0, .25, .5, .75, 1].flatMap(share => [
    node('line', {x1: share * width, x2: share * width, y1: 14, y2: height - 16,
      class: 'grid'}),
    node('text', {x: share * width, y: height - 3, 'text-anchor':
      share === 0 ? 'start' : share === 1 ? 'end' : 'middle'},
    share === 1 ? 'now' : `−${seconds((1 - share) * span)}`)]);
  fill('lanes', node('svg', {height, role: 'presentation'}, ...ticks, ...drawn));
  if (picked) at('lanes').setAttribute('aria-activedescendant', `life-${picked}`);
  const one = shownLives.find(life => life.id === picked);
  const text = one ? about(one) : 'A bar is a request, a red tick at the top ' +
    'one that was refused. Pick one with a click or the arrow keys.' +
    (undrawn ? ` ${undrawn} more do not fit.` : '');
  if (at('told').textContent !== text) at('told').textContent = text;
  fill('table', ...shownLives.slice(-40).reverse().map(life => node('tr', {},
    ...[life.id, words(life.outcome), count(life.prompt_tokens),
      count(reused(life)), count(life.output_tokens),
      seconds(life.ttft_s), seconds(life.tbt_s), life.prefill ?? '–',
      life.decode ?? '–'].map(cell => node('td', {}, cell)))));
}
function pick(id) { picked = id; drawLives(last); }

let last = null, timer = 0, paused = false, failed = 0;
const key = () => sessionStorage.getItem('mooncake_jax.key');
function draw(s) {
  at('page').hidden = false;
  at('title').textContent = s.title;
  document.title = `${s.title} · mooncake_jax`;
  at('mode').hidden = false;
  at('mode').textContent = s.mode;
  const ended = s.requests.filter(life => life.ttft_s != null);
  drawTiles(s);
  drawHistogram('ttft', s.slo.ttft_s, ended.map(life => life.ttft_s),
    s.recent.ttft_s, s.recent.ttft_attainment);
  drawHistogram('tbt', s.slo.tbt_s, ended.map(life => life.tbt_s),
    s.recent.tbt_tail_s, s.recent.tbt_attainment);
  drawShares(s);
  drawFleet(s);
  drawLives(s);
}
function tell(state, text) {
  at('dot').className = state;
  if (at('since').textContent !== text) at('since').textContent = text;
}
async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    const headers = key() ? {Authorization: `Bearer ${key()}`} : {};
    const answer = await fetch('status.json',
      {headers, cache: 'no-store', signal: AbortSignal.timeout(10000)});
    at('locked').hidden = answer.status !== 401;
    if (!answer.ok) throw new Error(answer.status === 401
      ? 'locked' : `answers ${answer.status}`);
    last = await answer.json();
    failed = 0;
    draw(last);
    tell('live', 'live');
  } catch (error) {
    failed++;
    tell('lost', error.message === 'locked' ? 'locked'
      : failed > 1 ? 'no answer, trying again' : 'waiting');
    if (error.message === 'locked') at('page').hidden = true;
  }
  timer = setTimeout(poll, Math.min(POLL_MS * 2 ** Math.min(failed, 4), 15000));
}
function pause() {
  paused = !paused;
  at('pause').setAttribute('aria-pressed', paused);
  at('pause').textContent = paused ? 'Resume' : 'Pause';
  if (paused) tell('', 'paused');
  poll();
}
fill('phases', ...PHASES.map(phase => node('li', {class: 'soft'},
  node('i', {css: {background: color(phase)}}), phase)));
at('pause').addEventListener('click', pause);
at('window').addEventListener('change', () => last && drawLives(last));
at('unlock').addEventListener('submit', event => {
  event.preventDefault();
  sessionStorage.setItem('mooncake_jax.key', at('key').value);
  at('key').value = '';
  poll();
});
at('lanes').addEventListener('keydown', event => {
  const step = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1,
    Home: -Infinity, End: Infinity}[event.key];
  if (!step || !shownLives.length) return;
  event.preventDefault();
  const here = shownLives.findIndex(life => life.id === picked);
  const from = here < 0 ? (step < 0 ? shownLives.length : -1) : here;
  pick(shownLives[Math.max(0, Math.min(shownLives.length - 1, from + step))].id);
});
document.addEventListener('keydown', event => {
  if (event.key === 'p' && !event.ctrlKey && !event.metaKey &&
      !/INPUT|SELECT/.test(event.target.tagName)) pause();
});
document.addEventListener('visibilitychange', poll);
addEventListener('resize', () => last && draw(last));
poll();
