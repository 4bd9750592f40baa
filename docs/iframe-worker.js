// Search when the site is opened from a disk: browsers start no worker from a file, so its script
// runs in a hidden frame. (Material's plugin `offline` looks for a file of this name.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><body></body>");
      inside.document.close();
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      const script = inside.document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      this.ready = new Promise(resolve => { script.onload = () => resolve(inside); });
      inside.document.body.append(script);
    }

    async postMessage(data) {
      const inside = await this.ready;
      inside.dispatchEvent(new inside.MessageEvent("message", {data}));
    }
  };
}
