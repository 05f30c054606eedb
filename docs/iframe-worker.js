"use strict"
// The search of the site runs in a worker, but browsers start no worker for a page that is opened from the disk. There
// this class runs the search in a hidden frame instead, with the interface of a worker. The theme expects its name.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      // Messages wait until the script in the frame can take them.
      this.ready = new Promise((resolve) => frame.addEventListener("load", () => resolve(frame.contentWindow)))
      frame.hidden = true
      frame.worker = this
      const script = String(url).replaceAll("&", "&amp;").replaceAll('"', "&quot;")
      const answers = "<script>postMessage = (data) => frameElement.worker.answer(data)</script>"
      frame.srcdoc = `${answers}<script src="${script}"></script>`
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })))
    }

    answer(data) {
      this.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
  window.Worker = window.IFrameWorker
}
