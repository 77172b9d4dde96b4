// Documents: upload, progress, download. The list is kept for the tab, so a reload does not lose it.

import { getJson, send, sendForm, sleep, toSentence, UNREACHABLE } from "./api.js";
import { describeDocumentWarning } from "./notes.js";

const STORED = "dragoman-documents";
const [FIRST_POLL, LAST_POLL] = [150, 1000]; // milliseconds between two questions for the progress
const UNFINISHED = ["uploading", "queued", "translating"];
const SHOWN_WARNINGS = 5; // the others are unfolded

export class Documents {
  /** `choose` returns the languages and the model for a new document; `announce` tells screen readers. */
  constructor(list, choose, announce) {
    Object.assign(this, { list, choose, announce, limit: 0, jobs: [] });
  }

  configure({ max_document_bytes: limit }) {
    this.limit = limit;
    for (const id of JSON.parse(sessionStorage.getItem(STORED) ?? "[]")) this.add({ id, name: "", status: "queued" }).follow();
  }

  /** Translate files. The server decides which ones it can read, since some are known by their content. */
  upload(files) {
    for (const file of files) {
      const job = this.add({ name: file.name, status: "uploading" });
      if (file.size > this.limit) job.fail(`The file is too large: ${formatBytes(this.limit)} are allowed.`);
      else job.start(file, this.choose());
    }
  }

  add(values) {
    const job = new DocumentJob(this, values);
    this.jobs.unshift(job);
    this.list.prepend(job.element);
    job.render();
    return job;
  }

  remove(job) {
    this.jobs = this.jobs.filter(other => other !== job);
    job.element.remove();
    this.store();
  }

  store() {
    sessionStorage.setItem(STORED, JSON.stringify(this.jobs.map(job => job.id).filter(Boolean).reverse()));
  }
}

class DocumentJob {
  constructor(documents, values) {
    Object.assign(this, { documents, warnings: [], done: 0, total: 0, error: "" }, values);
    this.controller = new AbortController();
    this.element = document.createElement("li");
    this.element.className = "card document";
    this.element.innerHTML = `<div class="document-head"><bdi class="name"></bdi><span class="hint state"></span></div>
      <progress max="1"></progress><div class="notes"></div>
      <div class="foot"><button type="button" class="button download">Download</button><button type="button" class="quiet remove"></button></div>`;
    this.find = selector => this.element.querySelector(selector);
    this.find(".download").addEventListener("click", () => this.download());
    this.find(".remove").addEventListener("click", () => this.remove());
  }

  get isUnfinished() {
    return UNFINISHED.includes(this.status);
  }

  /** Send the file, and follow its translation. */
  async start(file, fields) {
    const form = new FormData();
    for (const [name, value] of Object.entries(fields)) form.append(name, value);
    form.append("file", file);
    const { signal } = this.controller;
    const onProgress = (done, total) => this.update({ done, total, wait: 0 });
    const onWait = wait => this.update({ wait });
    try {
      this.update(await sendForm("api/documents", form, { signal, onProgress, onWait }));
    } catch (error) {
      if (!signal.aborted) this.fail(error.message);
      return;
    }
    this.documents.store();
    await this.follow();
  }

  /** Ask for the status until the translation is finished. */
  async follow() {
    const { signal } = this.controller;
    try {
      for (let failures = 0, pause = FIRST_POLL; this.isUnfinished; pause = Math.min(1.5 * pause, LAST_POLL)) {
        try {
          this.update(await getJson(`api/documents/${this.id}`, { signal }));
          failures = 0;
        } catch (error) {
          if (error !== UNREACHABLE || ++failures > 5) throw error;
        }
        if (this.isUnfinished) await sleep(pause, signal);
      }
      if (this.error) this.fail(toSentence(this.error));
      else this.documents.announce(`${this.name} is translated.`);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 404) this.documents.remove(this);
      else this.fail(error.message);
    }
  }

  update(values) {
    Object.assign(this, values);
    this.render();
  }

  fail(message) {
    this.update({ status: "error", error: message });
    this.documents.announce(`${this.name} was not translated.`);
  }

  async download() {
    const button = this.find(".download");
    button.disabled = true;
    this.update({ error: "" });
    try {
      const response = await send(`api/documents/${this.id}/result`);
      const given = /filename\*=utf-8''([^;]+)/i.exec(response.headers.get("Content-Disposition") ?? "");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await response.blob());
      link.download = given ? decodeURIComponent(given[1]) : this.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (error) {
      this.update({ error: error.message }); // the server still has the translation
      this.documents.announce(`${this.name} was not downloaded: ${error.message}`);
    }
    button.disabled = false;
  }

  async remove() {
    this.controller.abort();
    this.documents.remove(this);
    document.getElementById("file").focus();
    if (this.id) await send(`api/documents/${this.id}`, { method: "DELETE" }).catch(() => {});
  }

  render() {
    const { name, status, done, total, error } = this;
    const isOver = !this.isUnfinished;
    this.element.dataset.status = status;
    this.find(".name").textContent = name || "Document";
    this.find(".state").textContent = describeState(this);
    const progress = this.find("progress");
    progress.hidden = isOver;
    progress.setAttribute("aria-label", `Progress of ${name}`);
    if (total && status !== "queued") progress.value = done / total;
    else progress.removeAttribute("value");
    this.find(".download").hidden = status !== "done";
    this.find(".download").setAttribute("aria-label", `Download ${name}`);
    this.find(".remove").textContent = isOver ? "Remove" : "Cancel";
    this.find(".remove").setAttribute("aria-label", `${isOver ? "Remove" : "Cancel"} ${name}`);
    this.renderNotes(error ? [error] : this.warnings.map(describeDocumentWarning), error ? "problem" : "note");
  }

  renderNotes(notes, className) {
    const signature = JSON.stringify(notes);
    if (signature === this.shownNotes) return; // what the user has unfolded stays so
    this.shownNotes = signature;
    const lines = notes.map(textContent => Object.assign(document.createElement("p"), { className, textContent }));
    const hidden = lines.splice(SHOWN_WARNINGS);
    if (hidden.length) {
      const more = document.createElement("details");
      more.append(Object.assign(document.createElement("summary"), { textContent: `${hidden.length} more` }), ...hidden);
      lines.push(more);
    }
    this.find(".notes").replaceChildren(...lines);
  }
}

function describeState({ status, done, total, wait, seconds_left: left }) {
  if (wait) return `The server is busy. Trying again in ${wait} s`;
  if (status === "uploading") return total ? `Sending, ${Math.round((100 * done) / total)} %` : "Sending";
  if (status === "queued") return "Waiting for its turn";
  if (status === "done") return "Translated";
  if (status === "error") return "";
  const count = total ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")}` : "Translating";
  return left > 0 ? `${count}, ${formatSeconds(left)} left` : count;
}

function formatSeconds(seconds) {
  if (seconds < 60) return `${Math.ceil(seconds)} s`;
  return seconds < 3600 ? `${Math.ceil(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function formatBytes(bytes) {
  return bytes >= 1e6 ? `${(bytes / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MB` : `${Math.ceil(bytes / 1e3)} kB`;
}
