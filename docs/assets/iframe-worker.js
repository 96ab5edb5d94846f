// Browsers start no Worker for a page that is opened from disk. There an iframe runs the theme's search script in its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)))
      this.loaded = this.load(url)
    }

    load(url) {
      const script = this.scope.document.createElement("script")
      script.src = url
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
        this.scope.document.body.append(script)
      })
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
