/** Reads server-sent events off a response as they come. */

/**
 * @param {Response} response
 * @returns {AsyncGenerator<string>} the data of each event
 */
export async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split(/\r?\n\r?\n/);
      rest = frames.pop() ?? "";
      for (const frame of frames) {
        const data = dataOf(frame);
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(frame) {
  const lines = frame.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
