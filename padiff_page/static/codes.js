// A cell is one byte: nothing recorded, not compared, bit-equal, or how many times the allowed it is, on a logarithmic
// scale. A larger code is worse, so that many cells are folded by taking the largest.

export const BLANK = 0;
export const SKIPPED = 1;
export const EQUAL = 2;
const PASS = [3, 127];
const FAIL = [128, 254];
const ENDLESS = 255;
/** From which code on a cell is beyond its limit. */
export const BEYOND = FAIL[0];

// Powers of ten that the two scales reach from the limit: noise is seldom more than four below it.
const BELOW = 4;
const ABOVE = 6;

/** The code of a diff. */
export function codeOf(times, passed, compared, equal) {
  if (!passed) return Number.isFinite(times) ? within(FAIL, Math.log10(Math.max(times, 1)) / ABOVE) : ENDLESS;
  if (!compared) return SKIPPED;
  if (equal) return EQUAL;
  if (!(times > 0)) return PASS[0];
  return within(PASS, 1 + Math.log10(Math.min(times, 1)) / BELOW);
}

/** About how many times the allowed a code is. */
export function timesOf(code) {
  if (code === ENDLESS) return Infinity;
  if (code >= FAIL[0]) return 10 ** ((ABOVE * (code - FAIL[0])) / (FAIL[1] - FAIL[0]));
  if (code >= PASS[0]) return 10 ** (BELOW * ((code - PASS[0]) / (PASS[1] - PASS[0]) - 1));
  return code === EQUAL ? 0 : NaN;
}

function within([low, high], share) {
  return low + Math.round(Math.min(Math.max(share, 0), 1) * (high - low));
}

// Blue below the limit, orange to dark red above it: distinguished by those who confuse red and green, and by lightness
// in grey. What is bit-equal has a green of its own. tests/page holds the scales against three kinds of colour vision.
const LIGHT = {
  equal: [156, 207, 176],
  pass: [[232, 240, 248], [173, 203, 232], [84, 139, 196]],
  fail: [[255, 190, 92], [240, 120, 44], [196, 52, 28], [112, 14, 40]],
  endless: [64, 4, 32],
  blank: [0, 0, 0, 0],
  skipped: [206, 205, 200],
};
const DARK = {
  equal: [58, 118, 92],
  pass: [[32, 42, 56], [44, 72, 108], [74, 124, 186]],
  fail: [[150, 92, 20], [214, 120, 36], [246, 158, 84], [255, 222, 190]],
  endless: [255, 244, 236],
  blank: [0, 0, 0, 0],
  skipped: [70, 70, 74],
};

function mixed(stops, share) {
  const place = share * (stops.length - 1);
  const k = Math.min(Math.floor(place), stops.length - 2);
  return stops[k].map((from, i) => Math.round(from + (stops[k + 1][i] - from) * (place - k)));
}

/** The colours of all codes: as CSS has them, and as a picture's pixels. */
export function palette(dark) {
  return (PALETTES[dark ? 1 : 0] ??= made(dark));
}

const PALETTES = [];

function made(dark) {
  const table = dark ? DARK : LIGHT;
  const css = [];
  const pixels = new Uint32Array(256);
  for (let code = 0; code < 256; code++) {
    let rgb;
    if (code === BLANK) rgb = null;
    else if (code === SKIPPED) rgb = table.skipped;
    else if (code === EQUAL) rgb = table.equal;
    else if (code === ENDLESS) rgb = table.endless;
    else if (code >= FAIL[0]) rgb = mixed(table.fail, (code - FAIL[0]) / (FAIL[1] - FAIL[0]));
    else rgb = mixed(table.pass, (code - PASS[0]) / (PASS[1] - PASS[0]));
    css.push(rgb ? `rgb(${rgb.join(" ")})` : "transparent");
    pixels[code] = rgb ? ((255 << 24) | (rgb[2] << 16) | (rgb[1] << 8) | rgb[0]) >>> 0 : 0;
  }
  return { css, pixels };
}
