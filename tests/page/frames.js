// Three thousand layers by ten thousand steps: zooming, moving and hovering, and how long each frame took to draw.
(async () => {
  const { store, heat } = padiff;
  const [layers, steps] = [3000, 10000];
  const from = store.steps.length;
  for (let layer = 0; layer < layers; layer++) {
    const path = `blocks.${Math.floor(layer / 100)}.part${Math.floor(layer / 10) % 10}.layer${layer % 10}`;
    const site = store.site("forward", `${path}/forward/output.0`, `other.${layer}/forward/output.0`);
    for (let step = steps - 1; step >= 0; step--) {
      const share = ((step * 7919 + layer * 104729) % 1000) / 1000;
      const times = step > 6000 && layer > 1500 ? 1 + 1000 * share : share;
      store.put(site, from + step, times, times <= 1, true, false);
    }
  }
  for (let step = 0; step < steps; step++) store.addStep(100000 + step, true, 0);
  store.tree.sort();
  store.tree.openAll(true);
  padiff.setStage("forward");
  heat.update();
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const draw = async () => {
    heat.draw();
    await frame();
    await frame();
  };
  const wheel = (deltaX, deltaY) => heat.element.dispatchEvent(new WheelEvent("wheel", { deltaX, deltaY, cancelable: true }));
  await draw();
  heat.frames.length = 0;
  heat.fit();
  for (let k = 0; k < 20; k++) await draw();
  for (let k = 0; k < 14; k++) {
    heat.zoom(1.6);
    await draw();
  }
  for (let k = 0; k < 30; k++) {
    wheel(300, 200);
    await draw();
  }
  for (let k = 0; k < 14; k++) {
    heat.zoom(1 / 1.6);
    await draw();
  }
  const box = heat.element.getBoundingClientRect();
  const hovers = [];
  for (let k = 0; k < 20; k++) {
    const began = performance.now();
    heat.element.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 330 + 20 * k, clientY: box.top + 60 + 20 * k }));
    hovers.push(performance.now() - began);
  }
  const sorted = [...heat.frames].sort((a, b) => a - b);
  const at = (share) => sorted[Math.floor(share * (sorted.length - 1))];
  return { cells: layers * steps, frames: sorted.length, median: at(0.5), most: at(0.95), worst: at(1), hover: Math.max(...hovers) };
})()
