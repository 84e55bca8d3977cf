// Browsers start no worker from a file. So that search works when the site is opened from a folder, this runs the
// worker's script in a hidden frame instead, with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = []; // messages from before the script was there

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#frame.srcdoc = "<body></body>";
      this.#frame.onload = () => this.#start(new URL(url, location.href).href);
      document.body.append(this.#frame);
    }

    #start(url) {
      const inside = this.#frame.contentWindow;
      inside.postMessage = data => this.#tell(data);
      inside.importScripts = () => {}; // languages other than English
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.#waiting;
        this.#waiting = null;
        waiting.forEach(data => this.postMessage(data));
      };
      inside.document.body.append(script);
    }

    #tell(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
