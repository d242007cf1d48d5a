// Browsers refuse workers to a page that was opened as a file, so there the search runs in a hidden frame.
// The theme's worker asks for `IFrameWorker` by this name.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (address) =>
        new Promise((done, failed) => {
          const script = this.inner.document.createElement("script");
          Object.assign(script, { src: address, onload: done, onerror: failed });
          this.inner.document.body.append(script);
        });
      this.inner.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
