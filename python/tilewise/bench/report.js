'use strict';
for (const section of document.querySelectorAll('[data-growth]')) {
  const state = {suite: null, metric: 'throughput', slow: true};
  const suites = section.querySelector('select'), about = section.querySelector('.about');
  const slow = section.querySelector('input[type=checkbox]');
  const show = () => {
    state.suite = suites ? suites.value : null;
    state.slow = slow ? slow.checked : true;
    if (suites) about.textContent = suites.selectedOptions[0].dataset.about;
    for (const panel of section.querySelectorAll('.panel')) {
      const figures = [...panel.querySelectorAll('[data-metric]')];
      const fits = figures.filter(f => f.dataset.metric === state.metric);
      const chosen = fits.find(f => (f.dataset.slow === 'no') === !state.slow) || fits[0];
      for (const figure of figures) figure.hidden = figure !== chosen;
      panel.hidden = !chosen || (state.suite !== null && panel.dataset.suite !== state.suite);
    }
    const shown = [...section.querySelectorAll('.panel')].filter(panel => !panel.hidden);
    const names = new Set(shown.flatMap(panel => JSON.parse(panel.dataset.impls)));
    for (const item of section.querySelectorAll('.legend span')) item.hidden = !names.has(item.dataset.name);
    for (const button of section.querySelectorAll('button[data-metric-choice]'))
      button.setAttribute('aria-pressed', button.dataset.metricChoice === state.metric);
  };
  for (const button of section.querySelectorAll('button[data-metric-choice]'))
    button.addEventListener('click', () => { state.metric = button.dataset.metricChoice; show(); });
  if (suites) suites.addEventListener('change', show);
  if (slow) slow.addEventListener('change', show);
  show();
}
for (const holder of document.querySelectorAll('[data-rows]')) {
  const table = holder.querySelector('table'), body = table.tBodies[0];
  const search = holder.querySelector('input[type=search]'), count = holder.querySelector('.count');
  const more = holder.querySelector('.more'), all = [...body.rows];
  let limit = window.innerWidth > 820 ? 100 : 20;
  const value = (row, column) => {
    const cell = row.cells[column];
    if (!cell) return null;
    return 'v' in cell.dataset ? parseFloat(cell.dataset.v) : cell.textContent;
  };
  const text = row => `${row.textContent} ${row.dataset.short}`.toLowerCase();
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = [...body.rows].filter(row => words.every(word => text(row).includes(word)));
    const kept = new Set(fits.slice(0, limit));
    for (const row of body.rows) row.hidden = !kept.has(row);
    count.textContent = `${fits.length} of ${all.length} rows`;
    more.hidden = fits.length <= limit;
  };
  for (const [column, header] of [...table.tHead.rows[0].cells].entries()) {
    header.querySelector('button').addEventListener('click', () => {
      const up = header.getAttribute('aria-sort') !== 'ascending';
      for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
      header.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const sorted = [...body.rows].map(row => [value(row, column), row]);
      const empty = x => x === null || Number.isNaN(x);
      sorted.sort(([a], [b]) => {
        if (empty(a) || empty(b)) return empty(a) - empty(b);  // always last
        const order = typeof a === 'number' ? a - b : a.localeCompare(b, 'en', {numeric: true});
        return up ? order : -order;
      });
      body.append(...sorted.map(([, row]) => row));
      show();
    });
  }
  more.querySelector('button').addEventListener('click', () => { limit = Infinity; show(); });
  search.addEventListener('input', show);
  show();
}
for (const holder of document.querySelectorAll('[data-download]')) {
  const {name, columns, rows} = JSON.parse(holder.querySelector('script').textContent);
  const quoted = x => x === null ? '' : /[",\n]/.test(String(x)) ? `"${String(x).replaceAll('"', '""')}"` : String(x);
  const texts = {
    csv: () => [columns, ...rows].map(row => row.map(quoted).join(',')).join('\n') + '\n',
    jsonl: () => rows.map(row => JSON.stringify(Object.fromEntries(columns.map((key, n) => [key, row[n]])
      .filter(([, x]) => x !== null)))).join('\n') + '\n',
  };
  for (const button of holder.querySelectorAll('button')) {
    button.addEventListener('click', () => {
      const link = document.createElement('a');
      link.href = URL.createObjectURL(new Blob([texts[button.dataset.kind]()], {type: 'text/plain'}));
      link.download = `${name}.${button.dataset.kind}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    });
  }
}
document.documentElement.dataset.ready = 'yes';
