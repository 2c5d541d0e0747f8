// A page that was opened from a file (file://) may not start a Worker. The search then runs in a hidden frame of the
// page, which offers what the search needs of a Worker: messages in both directions, and importScripts.
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      this.loaded = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.addEventListener("load", resolve);
        script.addEventListener("error", () => this.dispatchEvent(new ErrorEvent("error", { filename: String(url) })));
        script.src = url;
        // In the frame postMessage goes to the page, as in a worker; importScripts loads one script after the other.
        inside.postMessage = (data) => this.receive(data);
        inside.importScripts = (...urls) =>
          urls.reduce((before, next) => before.then(() => FrameWorker.load(inside.document, next)), Promise.resolve());
        inside.document.body.append(script);
      });
    }

    static load(document, url) {
      return new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.addEventListener("load", resolve);
        script.addEventListener("error", reject);
        script.src = url;
        document.body.append(script);
      });
    }

    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      this.loaded.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.Worker = FrameWorker;
})();
