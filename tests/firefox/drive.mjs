/**
 * Opens a page in the Firefox that is installed, clicks into it, and writes what is to be seen, as JSON.
 *
 * What to do is read from the standard input: see `Asked` in driver.py.
 */
import { readFileSync } from "node:fs";
import puppeteer from "puppeteer-core";

const asked = JSON.parse(readFileSync(0, "utf-8"));
const timeout = asked.patience_ms;
const browser = await puppeteer.launch({ browser: "firefox", executablePath: asked.firefox, headless: true, timeout });
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(timeout);
  await page.setViewport(asked.viewport);
  const complaints = [];
  const requests = [];
  page.on("console", (said) => {
    if (["error", "warn", "warning"].includes(said.type())) complaints.push(said.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => requests.push(request.url()));
  await page.goto(asked.url);
  await page.waitForFunction(asked.ready);
  const seen = [];
  for (const { place, share, settled, look } of asked.clicks) {
    const box = await (await page.waitForSelector(place)).boundingBox();
    await page.mouse.click(box.x + share * box.width, box.y + box.height / 4);
    await page.waitForFunction(settled);
    seen.push(await page.evaluate(`(${look})()`));
  }
  const last = await page.evaluate(`(${asked.last})()`);
  await page.screenshot({ path: asked.shot });
  process.stdout.write(JSON.stringify({ seen, last, complaints, requests }));
} finally {
  await browser.close();
}
