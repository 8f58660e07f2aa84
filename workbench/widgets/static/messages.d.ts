// Made of extension/src/protocol.ts by: python -m workbench.cli.generate_front_end
export type { ViewAnswer as Answer, ViewQuestion as Question } from "../../../extension/src/protocol";
export type * from "../../../extension/src/protocol";
