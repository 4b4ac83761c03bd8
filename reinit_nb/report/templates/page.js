const all = (s, e = document) => [...e.querySelectorAll(s)], none = v => v === '\u2013' || v === '';
const value = c => c.dataset.v === undefined ? c.textContent.trim() : isNaN(c.dataset.v) ? c.dataset.v : +c.dataset.v;
const compare = (a, b) => typeof a == 'number' && typeof b == 'number' ? a-b : String(a).localeCompare(String(b), 'en', {numeric: true});
function sort(th) {
  const i = th.cellIndex, table = th.closest('table'), body = table.tBodies[0], up = th.getAttribute('aria-sort') != 'ascending';
  const rows = [...body.rows].map(r => [value(r.cells[i]), r]);
  rows.sort(([a], [b]) => none(a)-none(b) || (up ? compare(a, b) : compare(b, a)));
  for (const o of all('th[aria-sort]', table)) o.removeAttribute('aria-sort');
  th.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  body.append(...rows.map(o => o[1]));
}
for (const th of all('thead th')) {
  const b = document.createElement('button');
  b.type = 'button'; b.append(...th.childNodes); b.onclick = () => sort(th); th.append(b);
}

for (const form of all('form.filter')) {
  const rows = [...form.nextElementSibling.querySelector('tbody').rows], said = form.querySelector('output'), word = form.querySelector('input'), picks = all('select', form);
  const show = () => {
    const words = word.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = rows.filter(r => { const t = r.textContent.toLowerCase(), ok = words.every(w => t.includes(w)) && picks.every(s => !s.value || r.cells[s.dataset.col].textContent.trim() == s.value); r.hidden = !ok; return ok; });
    said.textContent = hits.length == rows.length ? `${rows.length} rows` : `${hits.length} of ${rows.length} rows`;
  };
  form.hidden = false; form.oninput = show; form.onsubmit = e => e.preventDefault(); show();
  const reveal = () => { const r = document.getElementById(decodeURIComponent(location.hash.slice(1))); if (rows.includes(r) && r.hidden) { form.reset(); show(); r.scrollIntoView(); } };
  addEventListener('hashchange', reveal); reveal();
}
const theme = document.getElementById('theme'), dark = matchMedia('(prefers-color-scheme: dark)');
const now = () => document.documentElement.dataset.theme || (dark.matches ? 'dark' : 'light'), say = () => { theme.textContent = now() == 'dark' ? 'Light' : 'Dark'; theme.setAttribute('aria-label', `Show the page in ${now() == 'dark' ? 'light' : 'dark'} colours`); };
theme.onclick = () => { document.documentElement.dataset.theme = now() == 'dark' ? 'light' : 'dark'; say(); };
dark.onchange = say; theme.hidden = false; say();
