#pragma once

#include <string_view>

// What BERT's tokenizer for uncased models knows of Unicode, as the tokenizers package has it (0.23; a test
// compares every code point): accents decomposed and dropped, then lower case. Characters that no table has
// stay as they are.

namespace minilm {

struct CodePoints {
  char32_t first, last;
};

// clang-format off

// Dropped: control, format and private-use characters, and marks that take no room of their own.
inline constexpr CodePoints dropped[] = {
    {0x0, 0x8}, {0xb, 0xc}, {0xe, 0x1f}, {0x7f, 0x9f}, {0xad, 0xad}, {0x300, 0x36f}, {0x483, 0x487},
    {0x591, 0x5bd}, {0x5bf, 0x5bf}, {0x5c1, 0x5c2}, {0x5c4, 0x5c5}, {0x5c7, 0x5c7}, {0x600, 0x605},
    {0x610, 0x61a}, {0x61c, 0x61c}, {0x64b, 0x65f}, {0x670, 0x670}, {0x6d6, 0x6dd}, {0x6df, 0x6e4},
    {0x6e7, 0x6e8}, {0x6ea, 0x6ed}, {0x70f, 0x70f}, {0x711, 0x711}, {0x730, 0x74a}, {0x7a6, 0x7b0},
    {0x7eb, 0x7f3}, {0x816, 0x819}, {0x81b, 0x823}, {0x825, 0x827}, {0x829, 0x82d}, {0x859, 0x85b},
    {0x8e3, 0x902}, {0x93a, 0x93a}, {0x93c, 0x93c}, {0x941, 0x948}, {0x94d, 0x94d}, {0x951, 0x957},
    {0x962, 0x963}, {0x981, 0x981}, {0x9bc, 0x9bc}, {0x9c1, 0x9c4}, {0x9cd, 0x9cd}, {0x9e2, 0x9e3},
    {0xa01, 0xa02}, {0xa3c, 0xa3c}, {0xa41, 0xa42}, {0xa47, 0xa48}, {0xa4b, 0xa4d}, {0xa51, 0xa51},
    {0xa70, 0xa71}, {0xa75, 0xa75}, {0xa81, 0xa82}, {0xabc, 0xabc}, {0xac1, 0xac5}, {0xac7, 0xac8},
    {0xacd, 0xacd}, {0xae2, 0xae3}, {0xb01, 0xb01}, {0xb3c, 0xb3c}, {0xb3f, 0xb3f}, {0xb41, 0xb44},
    {0xb4d, 0xb4d}, {0xb56, 0xb56}, {0xb62, 0xb63}, {0xb82, 0xb82}, {0xbc0, 0xbc0}, {0xbcd, 0xbcd},
    {0xc00, 0xc00}, {0xc3e, 0xc40}, {0xc46, 0xc48}, {0xc4a, 0xc4d}, {0xc55, 0xc56}, {0xc62, 0xc63},
    {0xc81, 0xc81}, {0xcbc, 0xcbc}, {0xcbf, 0xcbf}, {0xcc6, 0xcc6}, {0xccc, 0xccd}, {0xce2, 0xce3},
    {0xd01, 0xd01}, {0xd41, 0xd44}, {0xd4d, 0xd4d}, {0xd62, 0xd63}, {0xdca, 0xdca}, {0xdd2, 0xdd4},
    {0xdd6, 0xdd6}, {0xe31, 0xe31}, {0xe34, 0xe3a}, {0xe47, 0xe4e}, {0xeb1, 0xeb1}, {0xeb4, 0xeb9},
    {0xebb, 0xebc}, {0xec8, 0xecd}, {0xf18, 0xf19}, {0xf35, 0xf35}, {0xf37, 0xf37}, {0xf39, 0xf39},
    {0xf71, 0xf7e}, {0xf80, 0xf84}, {0xf86, 0xf87}, {0xf8d, 0xf97}, {0xf99, 0xfbc}, {0xfc6, 0xfc6},
    {0x102d, 0x1030}, {0x1032, 0x1037}, {0x1039, 0x103a}, {0x103d, 0x103e}, {0x1058, 0x1059},
    {0x105e, 0x1060}, {0x1071, 0x1074}, {0x1082, 0x1082}, {0x1085, 0x1086}, {0x108d, 0x108d},
    {0x109d, 0x109d}, {0x135d, 0x135f}, {0x1712, 0x1714}, {0x1732, 0x1734}, {0x1752, 0x1753},
    {0x1772, 0x1773}, {0x17b4, 0x17b5}, {0x17b7, 0x17bd}, {0x17c6, 0x17c6}, {0x17c9, 0x17d3},
    {0x17dd, 0x17dd}, {0x180b, 0x180e}, {0x18a9, 0x18a9}, {0x1920, 0x1922}, {0x1927, 0x1928},
    {0x1932, 0x1932}, {0x1939, 0x193b}, {0x1a17, 0x1a18}, {0x1a1b, 0x1a1b}, {0x1a56, 0x1a56},
    {0x1a58, 0x1a5e}, {0x1a60, 0x1a60}, {0x1a62, 0x1a62}, {0x1a65, 0x1a6c}, {0x1a73, 0x1a7c},
    {0x1a7f, 0x1a7f}, {0x1ab0, 0x1abd}, {0x1b00, 0x1b03}, {0x1b34, 0x1b34}, {0x1b36, 0x1b3a},
    {0x1b3c, 0x1b3c}, {0x1b42, 0x1b42}, {0x1b6b, 0x1b73}, {0x1b80, 0x1b81}, {0x1ba2, 0x1ba5},
    {0x1ba8, 0x1ba9}, {0x1bab, 0x1bad}, {0x1be6, 0x1be6}, {0x1be8, 0x1be9}, {0x1bed, 0x1bed},
    {0x1bef, 0x1bf1}, {0x1c2c, 0x1c33}, {0x1c36, 0x1c37}, {0x1cd0, 0x1cd2}, {0x1cd4, 0x1ce0},
    {0x1ce2, 0x1ce8}, {0x1ced, 0x1ced}, {0x1cf4, 0x1cf4}, {0x1cf8, 0x1cf9}, {0x1dc0, 0x1df5},
    {0x1dfc, 0x1dff}, {0x200b, 0x200f}, {0x202a, 0x202e}, {0x2060, 0x2064}, {0x2066, 0x206f},
    {0x20d0, 0x20dc}, {0x20e1, 0x20e1}, {0x20e5, 0x20f0}, {0x2cef, 0x2cf1}, {0x2d7f, 0x2d7f},
    {0x2de0, 0x2dff}, {0x302a, 0x302d}, {0x3099, 0x309a}, {0xa66f, 0xa66f}, {0xa674, 0xa67d},
    {0xa69e, 0xa69f}, {0xa6f0, 0xa6f1}, {0xa802, 0xa802}, {0xa806, 0xa806}, {0xa80b, 0xa80b},
    {0xa825, 0xa826}, {0xa8c4, 0xa8c4}, {0xa8e0, 0xa8f1}, {0xa926, 0xa92d}, {0xa947, 0xa951},
    {0xa980, 0xa982}, {0xa9b3, 0xa9b3}, {0xa9b6, 0xa9b9}, {0xa9bc, 0xa9bc}, {0xa9e5, 0xa9e5},
    {0xaa29, 0xaa2e}, {0xaa31, 0xaa32}, {0xaa35, 0xaa36}, {0xaa43, 0xaa43}, {0xaa4c, 0xaa4c},
    {0xaa7c, 0xaa7c}, {0xaab0, 0xaab0}, {0xaab2, 0xaab4}, {0xaab7, 0xaab8}, {0xaabe, 0xaabf},
    {0xaac1, 0xaac1}, {0xaaec, 0xaaed}, {0xaaf6, 0xaaf6}, {0xabe5, 0xabe5}, {0xabe8, 0xabe8},
    {0xabed, 0xabed}, {0xe000, 0xf8ff}, {0xfb1e, 0xfb1e}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f},
    {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xfffd, 0xfffd}, {0x101fd, 0x101fd}, {0x102e0, 0x102e0},
    {0x10376, 0x1037a}, {0x10a01, 0x10a03}, {0x10a05, 0x10a06}, {0x10a0c, 0x10a0f}, {0x10a38, 0x10a3a},
    {0x10a3f, 0x10a3f}, {0x10ae5, 0x10ae6}, {0x11001, 0x11001}, {0x11038, 0x11046}, {0x1107f, 0x11081},
    {0x110b3, 0x110b6}, {0x110b9, 0x110ba}, {0x110bd, 0x110bd}, {0x11100, 0x11102}, {0x11127, 0x1112b},
    {0x1112d, 0x11134}, {0x11173, 0x11173}, {0x11180, 0x11181}, {0x111b6, 0x111be}, {0x111ca, 0x111cc},
    {0x1122f, 0x11231}, {0x11234, 0x11234}, {0x11236, 0x11237}, {0x112df, 0x112df}, {0x112e3, 0x112ea},
    {0x11300, 0x11301}, {0x1133c, 0x1133c}, {0x11340, 0x11340}, {0x11366, 0x1136c}, {0x11370, 0x11374},
    {0x114b3, 0x114b8}, {0x114ba, 0x114ba}, {0x114bf, 0x114c0}, {0x114c2, 0x114c3}, {0x115b2, 0x115b5},
    {0x115bc, 0x115bd}, {0x115bf, 0x115c0}, {0x115dc, 0x115dd}, {0x11633, 0x1163a}, {0x1163d, 0x1163d},
    {0x1163f, 0x11640}, {0x116ab, 0x116ab}, {0x116ad, 0x116ad}, {0x116b0, 0x116b5}, {0x116b7, 0x116b7},
    {0x1171d, 0x1171f}, {0x11722, 0x11725}, {0x11727, 0x1172b}, {0x16af0, 0x16af4}, {0x16b30, 0x16b36},
    {0x16f8f, 0x16f92}, {0x1bc9d, 0x1bc9e}, {0x1bca0, 0x1bca3}, {0x1d167, 0x1d169}, {0x1d173, 0x1d182},
    {0x1d185, 0x1d18b}, {0x1d1aa, 0x1d1ad}, {0x1d242, 0x1d244}, {0x1da00, 0x1da36}, {0x1da3b, 0x1da6c},
    {0x1da75, 0x1da75}, {0x1da84, 0x1da84}, {0x1da9b, 0x1da9f}, {0x1daa1, 0x1daaf}, {0x1e8d0, 0x1e8d6},
    {0xe0001, 0xe0001}, {0xe0020, 0xe007f}, {0xe0100, 0xe01ef}, {0xf0000, 0xffffd}, {0x100000, 0x10fffd},
};

// Words of their own.
inline constexpr CodePoints punctuation[] = {
    {0x21, 0x2f}, {0x3a, 0x40}, {0x5b, 0x60}, {0x7b, 0x7e}, {0xa1, 0xa1}, {0xa7, 0xa7}, {0xab, 0xab},
    {0xb6, 0xb7}, {0xbb, 0xbb}, {0xbf, 0xbf}, {0x37e, 0x37e}, {0x387, 0x387}, {0x55a, 0x55f},
    {0x589, 0x58a}, {0x5be, 0x5be}, {0x5c0, 0x5c0}, {0x5c3, 0x5c3}, {0x5c6, 0x5c6}, {0x5f3, 0x5f4},
    {0x609, 0x60a}, {0x60c, 0x60d}, {0x61b, 0x61b}, {0x61e, 0x61f}, {0x66a, 0x66d}, {0x6d4, 0x6d4},
    {0x700, 0x70d}, {0x7f7, 0x7f9}, {0x830, 0x83e}, {0x85e, 0x85e}, {0x964, 0x965}, {0x970, 0x970},
    {0xaf0, 0xaf0}, {0xdf4, 0xdf4}, {0xe4f, 0xe4f}, {0xe5a, 0xe5b}, {0xf04, 0xf12}, {0xf14, 0xf14},
    {0xf3a, 0xf3d}, {0xf85, 0xf85}, {0xfd0, 0xfd4}, {0xfd9, 0xfda}, {0x104a, 0x104f}, {0x10fb, 0x10fb},
    {0x1360, 0x1368}, {0x1400, 0x1400}, {0x166d, 0x166e}, {0x169b, 0x169c}, {0x16eb, 0x16ed},
    {0x1735, 0x1736}, {0x17d4, 0x17d6}, {0x17d8, 0x17da}, {0x1800, 0x180a}, {0x1944, 0x1945},
    {0x1a1e, 0x1a1f}, {0x1aa0, 0x1aa6}, {0x1aa8, 0x1aad}, {0x1b5a, 0x1b60}, {0x1bfc, 0x1bff},
    {0x1c3b, 0x1c3f}, {0x1c7e, 0x1c7f}, {0x1cc0, 0x1cc7}, {0x1cd3, 0x1cd3}, {0x2010, 0x2027},
    {0x2030, 0x2043}, {0x2045, 0x2051}, {0x2053, 0x205e}, {0x207d, 0x207e}, {0x208d, 0x208e},
    {0x2308, 0x230b}, {0x2329, 0x232a}, {0x2768, 0x2775}, {0x27c5, 0x27c6}, {0x27e6, 0x27ef},
    {0x2983, 0x2998}, {0x29d8, 0x29db}, {0x29fc, 0x29fd}, {0x2cf9, 0x2cfc}, {0x2cfe, 0x2cff},
    {0x2d70, 0x2d70}, {0x2e00, 0x2e2e}, {0x2e30, 0x2e42}, {0x3001, 0x3003}, {0x3008, 0x3011},
    {0x3014, 0x301f}, {0x3030, 0x3030}, {0x303d, 0x303d}, {0x30a0, 0x30a0}, {0x30fb, 0x30fb},
    {0xa4fe, 0xa4ff}, {0xa60d, 0xa60f}, {0xa673, 0xa673}, {0xa67e, 0xa67e}, {0xa6f2, 0xa6f7},
    {0xa874, 0xa877}, {0xa8ce, 0xa8cf}, {0xa8f8, 0xa8fa}, {0xa8fc, 0xa8fc}, {0xa92e, 0xa92f},
    {0xa95f, 0xa95f}, {0xa9c1, 0xa9cd}, {0xa9de, 0xa9df}, {0xaa5c, 0xaa5f}, {0xaade, 0xaadf},
    {0xaaf0, 0xaaf1}, {0xabeb, 0xabeb}, {0xfd3e, 0xfd3f}, {0xfe10, 0xfe19}, {0xfe30, 0xfe52},
    {0xfe54, 0xfe61}, {0xfe63, 0xfe63}, {0xfe68, 0xfe68}, {0xfe6a, 0xfe6b}, {0xff01, 0xff03},
    {0xff05, 0xff0a}, {0xff0c, 0xff0f}, {0xff1a, 0xff1b}, {0xff1f, 0xff20}, {0xff3b, 0xff3d},
    {0xff3f, 0xff3f}, {0xff5b, 0xff5b}, {0xff5d, 0xff5d}, {0xff5f, 0xff65}, {0x10100, 0x10102},
    {0x1039f, 0x1039f}, {0x103d0, 0x103d0}, {0x1056f, 0x1056f}, {0x10857, 0x10857}, {0x1091f, 0x1091f},
    {0x1093f, 0x1093f}, {0x10a50, 0x10a58}, {0x10a7f, 0x10a7f}, {0x10af0, 0x10af6}, {0x10b39, 0x10b3f},
    {0x10b99, 0x10b9c}, {0x11047, 0x1104d}, {0x110bb, 0x110bc}, {0x110be, 0x110c1}, {0x11140, 0x11143},
    {0x11174, 0x11175}, {0x111c5, 0x111c9}, {0x111cd, 0x111cd}, {0x111db, 0x111db}, {0x111dd, 0x111df},
    {0x11238, 0x1123d}, {0x112a9, 0x112a9}, {0x114c6, 0x114c6}, {0x115c1, 0x115d7}, {0x11641, 0x11643},
    {0x1173c, 0x1173e}, {0x12470, 0x12474}, {0x16a6e, 0x16a6f}, {0x16af5, 0x16af5}, {0x16b37, 0x16b3b},
    {0x16b44, 0x16b44}, {0x1bc9f, 0x1bc9f}, {0x1da87, 0x1da8b},
};

// In pairs, ordered: a character, and the one it becomes.
inline constexpr std::u32string_view folded =
    U"AaBbCcDdEeFfGgHhIiJjKkLlMmNnOoPpQqRrSsTtUuVvWwXxYyZzÀaÁaÂaÃaÄaÅaÆæÇcÈeÉeÊeËeÌiÍiÎiÏiÐðÑnÒoÓoÔoÕoÖoØø"
    U"ÙuÚuÛuÜuÝyÞþàaáaâaãaäaåaçcèeéeêeëeìiíiîiïiñnòoóoôoõoöoùuúuûuüuýyÿyĀaāaĂaăaĄaąaĆcćcĈcĉcĊcċcČcčcĎdďdĐđ"
    U"ĒeēeĔeĕeĖeėeĘeęeĚeěeĜgĝgĞgğgĠgġgĢgģgĤhĥhĦħĨiĩiĪiīiĬiĭiĮiįiİiĲĳĴjĵjĶkķkĹlĺlĻlļlĽlľlĿŀŁłŃnńnŅnņnŇnňnŊŋ"
    U"ŌoōoŎoŏoŐoőoŒœŔrŕrŖrŗrŘrřrŚsśsŜsŝsŞsşsŠsšsŢtţtŤtťtŦŧŨuũuŪuūuŬuŭuŮuůuŰuűuŲuųuŴwŵwŶyŷyŸyŹzźzŻzżzŽzžzƁɓ"
    U"ƂƃƄƅƆɔƇƈƉɖƊɗƋƌƎǝƏəƐɛƑƒƓɠƔɣƖɩƗɨƘƙƜɯƝɲƟɵƠoơoƢƣƤƥƦʀƧƨƩʃƬƭƮʈƯuưuƱʊƲʋƳƴƵƶƷʒƸƹƼƽǄǆǅǆǇǉǈǉǊǌǋǌǍaǎaǏiǐiǑoǒoǓu"
    U"ǔuǕuǖuǗuǘuǙuǚuǛuǜuǞaǟaǠaǡaǢæǣæǤǥǦgǧgǨkǩkǪoǫoǬoǭoǮʒǯʒǰjǱǳǲǳǴgǵgǶƕǷƿǸnǹnǺaǻaǼæǽæǾøǿøȀaȁaȂaȃaȄeȅeȆeȇeȈi"
    U"ȉiȊiȋiȌoȍoȎoȏoȐrȑrȒrȓrȔuȕuȖuȗuȘsșsȚtțtȜȝȞhȟhȠƞȢȣȤȥȦaȧaȨeȩeȪoȫoȬoȭoȮoȯoȰoȱoȲyȳyȺⱥȻȼȽƚȾⱦɁɂɃƀɄʉɅʌɆɇɈɉɊɋ"
    U"ɌɍɎɏͰͱͲͳʹʹͶͷ;;Ϳϳ΅¨Άα··ΈεΉηΊιΌοΎυΏωΐιΑαΒβΓγΔδΕεΖζΗηΘθΙιΚκΛλΜμΝνΞξΟοΠπΡρΣσΤτΥυΦφΧχΨψΩωΪιΫυάαέεήηίιΰυϊι"
    U"ϋυόούυώωϏϗϓϒϔϒϘϙϚϛϜϝϞϟϠϡϢϣϤϥϦϧϨϩϪϫϬϭϮϯϴθϷϸϹϲϺϻϽͻϾͼϿͽЀеЁеЂђЃгЄєЅѕІіЇіЈјЉљЊњЋћЌкЍиЎуЏџАаБбВвГгДдЕеЖжЗз"
    U"ИиЙиКкЛлМмНнОоПпРрСсТтУуФфХхЦцЧчШшЩщЪъЫыЬьЭэЮюЯяйиѐеёеѓгїіќкѝиўуѠѡѢѣѤѥѦѧѨѩѪѫѬѭѮѯѰѱѲѳѴѵѶѵѷѵѸѹѺѻѼѽѾѿҀҁ"
    U"ҊҋҌҍҎҏҐґҒғҔҕҖҗҘҙҚқҜҝҞҟҠҡҢңҤҥҦҧҨҩҪҫҬҭҮүҰұҲҳҴҵҶҷҸҹҺһҼҽҾҿӀӏӁжӂжӃӄӅӆӇӈӉӊӋӌӍӎӐаӑаӒаӓаӔӕӖеӗеӘәӚәӛәӜжӝжӞзӟз"
    U"ӠӡӢиӣиӤиӥиӦоӧоӨөӪөӫөӬэӭэӮуӯуӰуӱуӲуӳуӴчӵчӶӷӸыӹыӺӻӼӽӾӿԀԁԂԃԄԅԆԇԈԉԊԋԌԍԎԏԐԑԒԓԔԕԖԗԘԙԚԛԜԝԞԟԠԡԢԣԤԥԦԧԨԩԪԫԬԭԮԯ"
    U"ԱաԲբԳգԴդԵեԶզԷէԸըԹթԺժԻիԼլԽխԾծԿկՀհՁձՂղՃճՄմՅյՆնՇշՈոՉչՊպՋջՌռՍսՎվՏտՐրՑցՒւՓփՔքՕօՖֆ\u0622\u0627\u0623\u0627"
    U"\u0624\u0648\u0625\u0627\u0626\u064a\u06c0\u06d5\u06c2\u06c1\u06d3\u06d2ऩनऱरऴळक़कख़खग़गज़जड़डढ़ढफ़फय़यড়ডঢ়ঢয়য"
    U"ਲ਼ਲਸ਼ਸਖ਼ਖਗ਼ਗਜ਼ਜਫ਼ਫ\u0b48\u0b47ଡ଼ଡଢ଼ଢ\u0cc0\u0cd5\u0cc7\u0cd5\u0cc8\u0cd6\u0cca\u0cc2\u0dda\u0dd9གྷགཌྷཌདྷདབྷབཛྷཛཀྵཀ"
    U"ဦဥႠⴀႡⴁႢⴂႣⴃႤⴄႥⴅႦⴆႧⴇႨⴈႩⴉႪⴊႫⴋႬⴌႭⴍႮⴎႯⴏႰⴐႱⴑႲⴒႳⴓႴⴔႵⴕႶⴖႷⴗႸⴘႹⴙႺⴚႻⴛႼⴜႽⴝႾⴞႿⴟჀⴠჁⴡჂⴢჃⴣჄⴤჅⴥჇⴧჍⴭᎠꭰᎡꭱᎢꭲᎣꭳᎤꭴᎥꭵᎦꭶᎧꭷᎨꭸ"
    U"ᎩꭹᎪꭺᎫꭻᎬꭼᎭꭽᎮꭾᎯꭿᎰꮀᎱꮁᎲꮂᎳꮃᎴꮄᎵꮅᎶꮆᎷꮇᎸꮈᎹꮉᎺꮊᎻꮋᎼꮌᎽꮍᎾꮎᎿꮏᏀꮐᏁꮑᏂꮒᏃꮓᏄꮔᏅꮕᏆꮖᏇꮗᏈꮘᏉꮙᏊꮚᏋꮛᏌꮜᏍꮝᏎꮞᏏꮟᏐꮠᏑꮡᏒꮢᏓꮣᏔꮤᏕꮥᏖꮦᏗꮧᏘꮨᏙꮩᏚꮪ"
    U"ᏛꮫᏜꮬᏝꮭᏞꮮᏟꮯᏠꮰᏡꮱᏢꮲᏣꮳᏤꮴᏥꮵᏦꮶᏧꮷᏨꮸᏩꮹᏪꮺᏫꮻᏬꮼᏭꮽᏮꮾᏯꮿᏰᏸᏱᏹᏲᏺᏳᏻᏴᏼᏵᏽ\u1b3b\u1b35\u1b3d\u1b35\u1b43\u1b35"
    U"\u1c89\u1c8aᲐაᲑბᲒგᲓდᲔეᲕვᲖზᲗთᲘიᲙკᲚლᲛმᲜნᲝოᲞპᲟჟᲠრᲡსᲢტᲣუᲤფᲥქᲦღᲧყᲨშᲩჩᲪცᲫძᲬწᲭჭᲮხᲯჯᲰჰᲱჱᲲჲᲳჳᲴჴᲵჵᲶჶᲷჷᲸჸᲹჹᲺჺᲽჽ"
    U"ᲾჾᲿჿḀaḁaḂbḃbḄbḅbḆbḇbḈcḉcḊdḋdḌdḍdḎdḏdḐdḑdḒdḓdḔeḕeḖeḗeḘeḙeḚeḛeḜeḝeḞfḟfḠgḡgḢhḣhḤhḥhḦhḧhḨhḩhḪhḫhḬiḭiḮiḯi"
    U"ḰkḱkḲkḳkḴkḵkḶlḷlḸlḹlḺlḻlḼlḽlḾmḿmṀmṁmṂmṃmṄnṅnṆnṇnṈnṉnṊnṋnṌoṍoṎoṏoṐoṑoṒoṓoṔpṕpṖpṗpṘrṙrṚrṛrṜrṝrṞrṟrṠsṡs"
    U"ṢsṣsṤsṥsṦsṧsṨsṩsṪtṫtṬtṭtṮtṯtṰtṱtṲuṳuṴuṵuṶuṷuṸuṹuṺuṻuṼvṽvṾvṿvẀwẁwẂwẃwẄwẅwẆwẇwẈwẉwẊxẋxẌxẍxẎyẏyẐzẑzẒzẓz"
    U"ẔzẕzẖhẗtẘwẙyẛſẞßẠaạaẢaảaẤaấaẦaầaẨaẩaẪaẫaẬaậaẮaắaẰaằaẲaẳaẴaẵaẶaặaẸeẹeẺeẻeẼeẽeẾeếeỀeềeỂeểeỄeễeỆeệeỈiỉi"
    U"ỊiịiỌoọoỎoỏoỐoốoỒoồoỔoổoỖoỗoỘoộoỚoớoỜoờoỞoởoỠoỡoỢoợoỤuụuỦuủuỨuứuỪuừuỬuửuỮuữuỰuựuỲyỳyỴyỵyỶyỷyỸyỹyỺỻỼỽ"
    U"ỾỿἀαἁαἂαἃαἄαἅαἆαἇαἈαἉαἊαἋαἌαἍαἎαἏαἐεἑεἒεἓεἔεἕεἘεἙεἚεἛεἜεἝεἠηἡηἢηἣηἤηἥηἦηἧηἨηἩηἪηἫηἬηἭηἮηἯηἰιἱιἲιἳιἴι"
    U"ἵιἶιἷιἸιἹιἺιἻιἼιἽιἾιἿιὀοὁοὂοὃοὄοὅοὈοὉοὊοὋοὌοὍοὐυὑυὒυὓυὔυὕυὖυὗυὙυὛυὝυὟυὠωὡωὢωὣωὤωὥωὦωὧωὨωὩωὪωὫωὬωὭωὮω"
    U"Ὧωὰαάαὲεέεὴηήηὶιίιὸοόοὺυύυὼωώωᾀαᾁαᾂαᾃαᾄαᾅαᾆαᾇαᾈαᾉαᾊαᾋαᾌαᾍαᾎαᾏαᾐηᾑηᾒηᾓηᾔηᾕηᾖηᾗηᾘηᾙηᾚηᾛηᾜηᾝηᾞηᾟηᾠωᾡωᾢω"
    U"ᾣωᾤωᾥωᾦωᾧωᾨωᾩωᾪωᾫωᾬωᾭωᾮωᾯωᾰαᾱαᾲαᾳαᾴαᾶαᾷαᾸαᾹαᾺαΆαᾼαιι῁¨ῂηῃηῄηῆηῇηῈεΈεῊηΉηῌη῍᾿῎᾿῏᾿ῐιῑιῒιΐιῖιῗιῘιῙιῚιΊι"
    U"῝῾῞῾῟῾ῠυῡυῢυΰυῤρῥρῦυῧυῨυῩυῪυΎυῬρ῭¨΅¨``ῲωῳωῴωῶωῷωῸοΌοῺωΏωῼω´´ΩωKkÅaℲⅎⅠⅰⅡⅱⅢⅲⅣⅳⅤⅴⅥⅵⅦⅶⅧⅷⅨⅸⅩⅹⅪⅺⅫⅻⅬⅼⅭⅽⅮⅾⅯⅿ"
    U"Ↄↄ↚←↛→↮↔⇍⇐⇎⇔⇏⇒∄∃∉∈∌∋∤∣∦∥≁∼≄≃≇≅≉≈≠=≢≡≭≍≮<≯>≰≤≱≥≴≲≵≳≸≶≹≷⊀≺⊁≻⊄⊂⊅⊃⊈⊆⊉⊇⊬⊢⊭⊨⊮⊩⊯⊫⋠≼⋡≽⋢⊑⋣⊒⋪⊲⋫⊳⋬⊴⋭⊵〈\u3008"
    U"〉\u3009ⒶⓐⒷⓑⒸⓒⒹⓓⒺⓔⒻⓕⒼⓖⒽⓗⒾⓘⒿⓙⓀⓚⓁⓛⓂⓜⓃⓝⓄⓞⓅⓟⓆⓠⓇⓡⓈⓢⓉⓣⓊⓤⓋⓥⓌⓦⓍⓧⓎⓨⓏⓩ⫝̸⫝ⰀⰰⰁⰱⰂⰲⰃⰳⰄⰴⰅⰵⰆⰶⰇⰷⰈⰸⰉⰹⰊⰺⰋⰻⰌⰼⰍⰽⰎⰾⰏⰿⰐⱀⰑⱁⰒⱂ"
    U"ⰓⱃⰔⱄⰕⱅⰖⱆⰗⱇⰘⱈⰙⱉⰚⱊⰛⱋⰜⱌⰝⱍⰞⱎⰟⱏⰠⱐⰡⱑⰢⱒⰣⱓⰤⱔⰥⱕⰦⱖⰧⱗⰨⱘⰩⱙⰪⱚⰫⱛⰬⱜⰭⱝⰮⱞⰯⱟⱠⱡⱢɫⱣᵽⱤɽⱧⱨⱩⱪⱫⱬⱭɑⱮɱⱯɐⱰɒⱲⱳⱵⱶⱾȿⱿɀⲀⲁⲂⲃⲄⲅⲆⲇⲈⲉⲊⲋ"
    U"ⲌⲍⲎⲏⲐⲑⲒⲓⲔⲕⲖⲗⲘⲙⲚⲛⲜⲝⲞⲟⲠⲡⲢⲣⲤⲥⲦⲧⲨⲩⲪⲫⲬⲭⲮⲯⲰⲱⲲⲳⲴⲵⲶⲷⲸⲹⲺⲻⲼⲽⲾⲿⳀⳁⳂⳃⳄⳅⳆⳇⳈⳉⳊⳋⳌⳍⳎⳏⳐⳑⳒⳓⳔⳕⳖⳗⳘⳙⳚⳛⳜⳝⳞⳟⳠⳡⳢⳣⳫⳬⳭⳮⳲⳳ"
    U"\u304c\u304b\u304e\u304d\u3050\u304f\u3052\u3051\u3054\u3053\u3056\u3055\u3058\u3057\u305a\u3059"
    U"\u305c\u305b\u305e\u305d\u3060\u305f\u3062\u3061\u3065\u3064\u3067\u3066\u3069\u3068\u3070\u306f"
    U"\u3071\u306f\u3073\u3072\u3074\u3072\u3076\u3075\u3077\u3075\u3079\u3078\u307a\u3078\u307c\u307b"
    U"\u307d\u307b\u3094\u3046\u309e\u309d\u30ac\u30ab\u30ae\u30ad\u30b0\u30af\u30b2\u30b1\u30b4\u30b3"
    U"\u30b6\u30b5\u30b8\u30b7\u30ba\u30b9\u30bc\u30bb\u30be\u30bd\u30c0\u30bf\u30c2\u30c1\u30c5\u30c4"
    U"\u30c7\u30c6\u30c9\u30c8\u30d0\u30cf\u30d1\u30cf\u30d3\u30d2\u30d4\u30d2\u30d6\u30d5\u30d7\u30d5"
    U"\u30d9\u30d8\u30da\u30d8\u30dc\u30db\u30dd\u30db\u30f4\u30a6\u30f7\u30ef\u30f8\u30f0\u30f9\u30f1"
    U"\u30fa\u30f2\u30fe\u30fdꙀꙁꙂꙃꙄꙅꙆꙇꙈꙉꙊꙋꙌꙍꙎꙏꙐꙑꙒꙓꙔꙕꙖꙗꙘꙙꙚꙛꙜꙝꙞꙟꙠꙡꙢꙣꙤꙥꙦꙧꙨꙩꙪꙫꙬꙭꚀꚁꚂꚃꚄꚅꚆꚇꚈꚉꚊꚋꚌꚍꚎꚏꚐꚑꚒꚓꚔꚕꚖꚗꚘꚙꚚꚛꜢꜣ"
    U"ꜤꜥꜦꜧꜨꜩꜪꜫꜬꜭꜮꜯꜲꜳꜴꜵꜶꜷꜸꜹꜺꜻꜼꜽꜾꜿꝀꝁꝂꝃꝄꝅꝆꝇꝈꝉꝊꝋꝌꝍꝎꝏꝐꝑꝒꝓꝔꝕꝖꝗꝘꝙꝚꝛꝜꝝꝞꝟꝠꝡꝢꝣꝤꝥꝦꝧꝨꝩꝪꝫꝬꝭꝮꝯꝹꝺꝻꝼꝽᵹꝾꝿꞀꞁꞂꞃꞄꞅꞆꞇꞋꞌꞍɥꞐꞑꞒꞓꞖꞗ"
    U"ꞘꞙꞚꞛꞜꞝꞞꞟꞠꞡꞢꞣꞤꞥꞦꞧꞨꞩꞪɦꞫɜꞬɡꞭɬꞮɪꞰʞꞱʇꞲʝꞳꭓꞴꞵꞶꞷꞸꞹꞺꞻꞼꞽꞾꞿꟀꟁꟂꟃꟄꞔꟅʂꟆᶎꟇꟈꟉꟊ\ua7cbɤ\ua7cc\ua7cd\ua7ce\ua7cfꟐꟑ"
    U"\ua7d2ꟓ\ua7d4ꟕꟖꟗꟘꟙ\ua7da\ua7db\ua7dcƛꟵꟶ\uf900\u8c48\uf901\u66f4\uf902\u8eca\uf903\u8cc8\uf904\u6ed1"
    U"\uf905\u4e32\uf906\u53e5\uf907\u9f9c\uf908\u9f9c\uf909\u5951\uf90a\u91d1\uf90b\u5587\uf90c\u5948"
    U"\uf90d\u61f6\uf90e\u7669\uf90f\u7f85\uf910\u863f\uf911\u87ba\uf912\u88f8\uf913\u908f\uf914\u6a02"
    U"\uf915\u6d1b\uf916\u70d9\uf917\u73de\uf918\u843d\uf919\u916a\uf91a\u99f1\uf91b\u4e82\uf91c\u5375"
    U"\uf91d\u6b04\uf91e\u721b\uf91f\u862d\uf920\u9e1e\uf921\u5d50\uf922\u6feb\uf923\u85cd\uf924\u8964"
    U"\uf925\u62c9\uf926\u81d8\uf927\u881f\uf928\u5eca\uf929\u6717\uf92a\u6d6a\uf92b\u72fc\uf92c\u90ce"
    U"\uf92d\u4f86\uf92e\u51b7\uf92f\u52de\uf930\u64c4\uf931\u6ad3\uf932\u7210\uf933\u76e7\uf934\u8001"
    U"\uf935\u8606\uf936\u865c\uf937\u8def\uf938\u9732\uf939\u9b6f\uf93a\u9dfa\uf93b\u788c\uf93c\u797f"
    U"\uf93d\u7da0\uf93e\u83c9\uf93f\u9304\uf940\u9e7f\uf941\u8ad6\uf942\u58df\uf943\u5f04\uf944\u7c60"
    U"\uf945\u807e\uf946\u7262\uf947\u78ca\uf948\u8cc2\uf949\u96f7\uf94a\u58d8\uf94b\u5c62\uf94c\u6a13"
    U"\uf94d\u6dda\uf94e\u6f0f\uf94f\u7d2f\uf950\u7e37\uf951\u964b\uf952\u52d2\uf953\u808b\uf954\u51dc"
    U"\uf955\u51cc\uf956\u7a1c\uf957\u7dbe\uf958\u83f1\uf959\u9675\uf95a\u8b80\uf95b\u62cf\uf95c\u6a02"
    U"\uf95d\u8afe\uf95e\u4e39\uf95f\u5be7\uf960\u6012\uf961\u7387\uf962\u7570\uf963\u5317\uf964\u78fb"
    U"\uf965\u4fbf\uf966\u5fa9\uf967\u4e0d\uf968\u6ccc\uf969\u6578\uf96a\u7d22\uf96b\u53c3\uf96c\u585e"
    U"\uf96d\u7701\uf96e\u8449\uf96f\u8aaa\uf970\u6bba\uf971\u8fb0\uf972\u6c88\uf973\u62fe\uf974\u82e5"
    U"\uf975\u63a0\uf976\u7565\uf977\u4eae\uf978\u5169\uf979\u51c9\uf97a\u6881\uf97b\u7ce7\uf97c\u826f"
    U"\uf97d\u8ad2\uf97e\u91cf\uf97f\u52f5\uf980\u5442\uf981\u5973\uf982\u5eec\uf983\u65c5\uf984\u6ffe"
    U"\uf985\u792a\uf986\u95ad\uf987\u9a6a\uf988\u9e97\uf989\u9ece\uf98a\u529b\uf98b\u66c6\uf98c\u6b77"
    U"\uf98d\u8f62\uf98e\u5e74\uf98f\u6190\uf990\u6200\uf991\u649a\uf992\u6f23\uf993\u7149\uf994\u7489"
    U"\uf995\u79ca\uf996\u7df4\uf997\u806f\uf998\u8f26\uf999\u84ee\uf99a\u9023\uf99b\u934a\uf99c\u5217"
    U"\uf99d\u52a3\uf99e\u54bd\uf99f\u70c8\uf9a0\u88c2\uf9a1\u8aaa\uf9a2\u5ec9\uf9a3\u5ff5\uf9a4\u637b"
    U"\uf9a5\u6bae\uf9a6\u7c3e\uf9a7\u7375\uf9a8\u4ee4\uf9a9\u56f9\uf9aa\u5be7\uf9ab\u5dba\uf9ac\u601c"
    U"\uf9ad\u73b2\uf9ae\u7469\uf9af\u7f9a\uf9b0\u8046\uf9b1\u9234\uf9b2\u96f6\uf9b3\u9748\uf9b4\u9818"
    U"\uf9b5\u4f8b\uf9b6\u79ae\uf9b7\u91b4\uf9b8\u96b8\uf9b9\u60e1\uf9ba\u4e86\uf9bb\u50da\uf9bc\u5bee"
    U"\uf9bd\u5c3f\uf9be\u6599\uf9bf\u6a02\uf9c0\u71ce\uf9c1\u7642\uf9c2\u84fc\uf9c3\u907c\uf9c4\u9f8d"
    U"\uf9c5\u6688\uf9c6\u962e\uf9c7\u5289\uf9c8\u677b\uf9c9\u67f3\uf9ca\u6d41\uf9cb\u6e9c\uf9cc\u7409"
    U"\uf9cd\u7559\uf9ce\u786b\uf9cf\u7d10\uf9d0\u985e\uf9d1\u516d\uf9d2\u622e\uf9d3\u9678\uf9d4\u502b"
    U"\uf9d5\u5d19\uf9d6\u6dea\uf9d7\u8f2a\uf9d8\u5f8b\uf9d9\u6144\uf9da\u6817\uf9db\u7387\uf9dc\u9686"
    U"\uf9dd\u5229\uf9de\u540f\uf9df\u5c65\uf9e0\u6613\uf9e1\u674e\uf9e2\u68a8\uf9e3\u6ce5\uf9e4\u7406"
    U"\uf9e5\u75e2\uf9e6\u7f79\uf9e7\u88cf\uf9e8\u88e1\uf9e9\u91cc\uf9ea\u96e2\uf9eb\u533f\uf9ec\u6eba"
    U"\uf9ed\u541d\uf9ee\u71d0\uf9ef\u7498\uf9f0\u85fa\uf9f1\u96a3\uf9f2\u9c57\uf9f3\u9e9f\uf9f4\u6797"
    U"\uf9f5\u6dcb\uf9f6\u81e8\uf9f7\u7acb\uf9f8\u7b20\uf9f9\u7c92\uf9fa\u72c0\uf9fb\u7099\uf9fc\u8b58"
    U"\uf9fd\u4ec0\uf9fe\u8336\uf9ff\u523a\ufa00\u5207\ufa01\u5ea6\ufa02\u62d3\ufa03\u7cd6\ufa04\u5b85"
    U"\ufa05\u6d1e\ufa06\u66b4\ufa07\u8f3b\ufa08\u884c\ufa09\u964d\ufa0a\u898b\ufa0b\u5ed3\ufa0c\u5140"
    U"\ufa0d\u55c0\ufa10\u585a\ufa12\u6674\ufa15\u51de\ufa16\u732a\ufa17\u76ca\ufa18\u793c\ufa19\u795e"
    U"\ufa1a\u7965\ufa1b\u798f\ufa1c\u9756\ufa1d\u7cbe\ufa1e\u7fbd\ufa20\u8612\ufa22\u8af8\ufa25\u9038"
    U"\ufa26\u90fd\ufa2a\u98ef\ufa2b\u98fc\ufa2c\u9928\ufa2d\u9db4\ufa2e\u90de\ufa2f\u96b7\ufa30\u4fae"
    U"\ufa31\u50e7\ufa32\u514d\ufa33\u52c9\ufa34\u52e4\ufa35\u5351\ufa36\u559d\ufa37\u5606\ufa38\u5668"
    U"\ufa39\u5840\ufa3a\u58a8\ufa3b\u5c64\ufa3c\u5c6e\ufa3d\u6094\ufa3e\u6168\ufa3f\u618e\ufa40\u61f2"
    U"\ufa41\u654f\ufa42\u65e2\ufa43\u6691\ufa44\u6885\ufa45\u6d77\ufa46\u6e1a\ufa47\u6f22\ufa48\u716e"
    U"\ufa49\u722b\ufa4a\u7422\ufa4b\u7891\ufa4c\u793e\ufa4d\u7949\ufa4e\u7948\ufa4f\u7950\ufa50\u7956"
    U"\ufa51\u795d\ufa52\u798d\ufa53\u798e\ufa54\u7a40\ufa55\u7a81\ufa56\u7bc0\ufa57\u7df4\ufa58\u7e09"
    U"\ufa59\u7e41\ufa5a\u7f72\ufa5b\u8005\ufa5c\u81ed\ufa5d\u8279\ufa5e\u8279\ufa5f\u8457\ufa60\u8910"
    U"\ufa61\u8996\ufa62\u8b01\ufa63\u8b39\ufa64\u8cd3\ufa65\u8d08\ufa66\u8fb6\ufa67\u9038\ufa68\u96e3"
    U"\ufa69\u97ff\ufa6a\u983b\ufa6b\u6075\ufa6c\U000242ee\ufa6d\u8218\ufa70\u4e26\ufa71\u51b5\ufa72\u5168"
    U"\ufa73\u4f80\ufa74\u5145\ufa75\u5180\ufa76\u52c7\ufa77\u52fa\ufa78\u559d\ufa79\u5555\ufa7a\u5599"
    U"\ufa7b\u55e2\ufa7c\u585a\ufa7d\u58b3\ufa7e\u5944\ufa7f\u5954\ufa80\u5a62\ufa81\u5b28\ufa82\u5ed2"
    U"\ufa83\u5ed9\ufa84\u5f69\ufa85\u5fad\ufa86\u60d8\ufa87\u614e\ufa88\u6108\ufa89\u618e\ufa8a\u6160"
    U"\ufa8b\u61f2\ufa8c\u6234\ufa8d\u63c4\ufa8e\u641c\ufa8f\u6452\ufa90\u6556\ufa91\u6674\ufa92\u6717"
    U"\ufa93\u671b\ufa94\u6756\ufa95\u6b79\ufa96\u6bba\ufa97\u6d41\ufa98\u6edb\ufa99\u6ecb\ufa9a\u6f22"
    U"\ufa9b\u701e\ufa9c\u716e\ufa9d\u77a7\ufa9e\u7235\ufa9f\u72af\ufaa0\u732a\ufaa1\u7471\ufaa2\u7506"
    U"\ufaa3\u753b\ufaa4\u761d\ufaa5\u761f\ufaa6\u76ca\ufaa7\u76db\ufaa8\u76f4\ufaa9\u774a\ufaaa\u7740"
    U"\ufaab\u78cc\ufaac\u7ab1\ufaad\u7bc0\ufaae\u7c7b\ufaaf\u7d5b\ufab0\u7df4\ufab1\u7f3e\ufab2\u8005"
    U"\ufab3\u8352\ufab4\u83ef\ufab5\u8779\ufab6\u8941\ufab7\u8986\ufab8\u8996\ufab9\u8abf\ufaba\u8af8"
    U"\ufabb\u8acb\ufabc\u8b01\ufabd\u8afe\ufabe\u8aed\ufabf\u8b39\ufac0\u8b8a\ufac1\u8d08\ufac2\u8f38"
    U"\ufac3\u9072\ufac4\u9199\ufac5\u9276\ufac6\u967c\ufac7\u96e3\ufac8\u9756\ufac9\u97db\ufaca\u97ff"
    U"\ufacb\u980b\ufacc\u983b\ufacd\u9b12\uface\u9f9c\ufacf\U0002284a\ufad0\U00022844\ufad1\U000233d5"
    U"\ufad2\u3b9d\ufad3\u4018\ufad4\u4039\ufad5\U00025249\ufad6\U00025cd0\ufad7\U00027ed3\ufad8\u9f43"
    U"\ufad9\u9f8e\ufb1d\u05d9\ufb1f\u05f2\ufb2a\u05e9\ufb2b\u05e9\ufb2c\u05e9\ufb2d\u05e9\ufb2e\u05d0"
    U"\ufb2f\u05d0\ufb30\u05d0\ufb31\u05d1\ufb32\u05d2\ufb33\u05d3\ufb34\u05d4\ufb35\u05d5\ufb36\u05d6"
    U"\ufb38\u05d8\ufb39\u05d9\ufb3a\u05da\ufb3b\u05db\ufb3c\u05dc\ufb3e\u05de\ufb40\u05e0\ufb41\u05e1"
    U"\ufb43\u05e3\ufb44\u05e4\ufb46\u05e6\ufb47\u05e7\ufb48\u05e8\ufb49\u05e9\ufb4a\u05ea\ufb4b\u05d5"
    U"\ufb4c\u05d1\ufb4d\u05db\ufb4e\u05e4ＡａＢｂＣｃＤｄＥｅＦｆＧｇＨｈＩｉＪｊＫｋＬｌＭｍＮｎＯｏＰｐＱｑＲｒＳｓＴｔＵｕＶｖＷｗＸｘＹｙＺｚ"
    U"\U00010400\U00010428\U00010401\U00010429\U00010402\U0001042a\U00010403\U0001042b\U00010404\U0001042c"
    U"\U00010405\U0001042d\U00010406\U0001042e\U00010407\U0001042f\U00010408\U00010430\U00010409\U00010431"
    U"\U0001040a\U00010432\U0001040b\U00010433\U0001040c\U00010434\U0001040d\U00010435\U0001040e\U00010436"
    U"\U0001040f\U00010437\U00010410\U00010438\U00010411\U00010439\U00010412\U0001043a\U00010413\U0001043b"
    U"\U00010414\U0001043c\U00010415\U0001043d\U00010416\U0001043e\U00010417\U0001043f\U00010418\U00010440"
    U"\U00010419\U00010441\U0001041a\U00010442\U0001041b\U00010443\U0001041c\U00010444\U0001041d\U00010445"
    U"\U0001041e\U00010446\U0001041f\U00010447\U00010420\U00010448\U00010421\U00010449\U00010422\U0001044a"
    U"\U00010423\U0001044b\U00010424\U0001044c\U00010425\U0001044d\U00010426\U0001044e\U00010427\U0001044f"
    U"\U000104b0\U000104d8\U000104b1\U000104d9\U000104b2\U000104da\U000104b3\U000104db\U000104b4\U000104dc"
    U"\U000104b5\U000104dd\U000104b6\U000104de\U000104b7\U000104df\U000104b8\U000104e0\U000104b9\U000104e1"
    U"\U000104ba\U000104e2\U000104bb\U000104e3\U000104bc\U000104e4\U000104bd\U000104e5\U000104be\U000104e6"
    U"\U000104bf\U000104e7\U000104c0\U000104e8\U000104c1\U000104e9\U000104c2\U000104ea\U000104c3\U000104eb"
    U"\U000104c4\U000104ec\U000104c5\U000104ed\U000104c6\U000104ee\U000104c7\U000104ef\U000104c8\U000104f0"
    U"\U000104c9\U000104f1\U000104ca\U000104f2\U000104cb\U000104f3\U000104cc\U000104f4\U000104cd\U000104f5"
    U"\U000104ce\U000104f6\U000104cf\U000104f7\U000104d0\U000104f8\U000104d1\U000104f9\U000104d2\U000104fa"
    U"\U000104d3\U000104fb\U00010570\U00010597\U00010571\U00010598\U00010572\U00010599\U00010573\U0001059a"
    U"\U00010574\U0001059b\U00010575\U0001059c\U00010576\U0001059d\U00010577\U0001059e\U00010578\U0001059f"
    U"\U00010579\U000105a0\U0001057a\U000105a1\U0001057c\U000105a3\U0001057d\U000105a4\U0001057e\U000105a5"
    U"\U0001057f\U000105a6\U00010580\U000105a7\U00010581\U000105a8\U00010582\U000105a9\U00010583\U000105aa"
    U"\U00010584\U000105ab\U00010585\U000105ac\U00010586\U000105ad\U00010587\U000105ae\U00010588\U000105af"
    U"\U00010589\U000105b0\U0001058a\U000105b1\U0001058c\U000105b3\U0001058d\U000105b4\U0001058e\U000105b5"
    U"\U0001058f\U000105b6\U00010590\U000105b7\U00010591\U000105b8\U00010592\U000105b9\U00010594\U000105bb"
    U"\U00010595\U000105bc\U00010c80\U00010cc0\U00010c81\U00010cc1\U00010c82\U00010cc2\U00010c83\U00010cc3"
    U"\U00010c84\U00010cc4\U00010c85\U00010cc5\U00010c86\U00010cc6\U00010c87\U00010cc7\U00010c88\U00010cc8"
    U"\U00010c89\U00010cc9\U00010c8a\U00010cca\U00010c8b\U00010ccb\U00010c8c\U00010ccc\U00010c8d\U00010ccd"
    U"\U00010c8e\U00010cce\U00010c8f\U00010ccf\U00010c90\U00010cd0\U00010c91\U00010cd1\U00010c92\U00010cd2"
    U"\U00010c93\U00010cd3\U00010c94\U00010cd4\U00010c95\U00010cd5\U00010c96\U00010cd6\U00010c97\U00010cd7"
    U"\U00010c98\U00010cd8\U00010c99\U00010cd9\U00010c9a\U00010cda\U00010c9b\U00010cdb\U00010c9c\U00010cdc"
    U"\U00010c9d\U00010cdd\U00010c9e\U00010cde\U00010c9f\U00010cdf\U00010ca0\U00010ce0\U00010ca1\U00010ce1"
    U"\U00010ca2\U00010ce2\U00010ca3\U00010ce3\U00010ca4\U00010ce4\U00010ca5\U00010ce5\U00010ca6\U00010ce6"
    U"\U00010ca7\U00010ce7\U00010ca8\U00010ce8\U00010ca9\U00010ce9\U00010caa\U00010cea\U00010cab\U00010ceb"
    U"\U00010cac\U00010cec\U00010cad\U00010ced\U00010cae\U00010cee\U00010caf\U00010cef\U00010cb0\U00010cf0"
    U"\U00010cb1\U00010cf1\U00010cb2\U00010cf2\U00010d50\U00010d70\U00010d51\U00010d71\U00010d52\U00010d72"
    U"\U00010d53\U00010d73\U00010d54\U00010d74\U00010d55\U00010d75\U00010d56\U00010d76\U00010d57\U00010d77"
    U"\U00010d58\U00010d78\U00010d59\U00010d79\U00010d5a\U00010d7a\U00010d5b\U00010d7b\U00010d5c\U00010d7c"
    U"\U00010d5d\U00010d7d\U00010d5e\U00010d7e\U00010d5f\U00010d7f\U00010d60\U00010d80\U00010d61\U00010d81"
    U"\U00010d62\U00010d82\U00010d63\U00010d83\U00010d64\U00010d84\U00010d65\U00010d85\U0001109a\U00011099"
    U"\U0001109c\U0001109b\U000110ab\U000110a5\U000114bb\U000114b9\U000118a0\U000118c0\U000118a1\U000118c1"
    U"\U000118a2\U000118c2\U000118a3\U000118c3\U000118a4\U000118c4\U000118a5\U000118c5\U000118a6\U000118c6"
    U"\U000118a7\U000118c7\U000118a8\U000118c8\U000118a9\U000118c9\U000118aa\U000118ca\U000118ab\U000118cb"
    U"\U000118ac\U000118cc\U000118ad\U000118cd\U000118ae\U000118ce\U000118af\U000118cf\U000118b0\U000118d0"
    U"\U000118b1\U000118d1\U000118b2\U000118d2\U000118b3\U000118d3\U000118b4\U000118d4\U000118b5\U000118d5"
    U"\U000118b6\U000118d6\U000118b7\U000118d7\U000118b8\U000118d8\U000118b9\U000118d9\U000118ba\U000118da"
    U"\U000118bb\U000118db\U000118bc\U000118dc\U000118bd\U000118dd\U000118be\U000118de\U000118bf\U000118df"
    U"\U00016e40\U00016e60\U00016e41\U00016e61\U00016e42\U00016e62\U00016e43\U00016e63\U00016e44\U00016e64"
    U"\U00016e45\U00016e65\U00016e46\U00016e66\U00016e47\U00016e67\U00016e48\U00016e68\U00016e49\U00016e69"
    U"\U00016e4a\U00016e6a\U00016e4b\U00016e6b\U00016e4c\U00016e6c\U00016e4d\U00016e6d\U00016e4e\U00016e6e"
    U"\U00016e4f\U00016e6f\U00016e50\U00016e70\U00016e51\U00016e71\U00016e52\U00016e72\U00016e53\U00016e73"
    U"\U00016e54\U00016e74\U00016e55\U00016e75\U00016e56\U00016e76\U00016e57\U00016e77\U00016e58\U00016e78"
    U"\U00016e59\U00016e79\U00016e5a\U00016e7a\U00016e5b\U00016e7b\U00016e5c\U00016e7c\U00016e5d\U00016e7d"
    U"\U00016e5e\U00016e7e\U00016e5f\U00016e7f\U00016ea0\U00016ebb\U00016ea1\U00016ebc\U00016ea2\U00016ebd"
    U"\U00016ea3\U00016ebe\U00016ea4\U00016ebf\U00016ea5\U00016ec0\U00016ea6\U00016ec1\U00016ea7\U00016ec2"
    U"\U00016ea8\U00016ec3\U00016ea9\U00016ec4\U00016eaa\U00016ec5\U00016eab\U00016ec6\U00016eac\U00016ec7"
    U"\U00016ead\U00016ec8\U00016eae\U00016ec9\U00016eaf\U00016eca\U00016eb0\U00016ecb\U00016eb1\U00016ecc"
    U"\U00016eb2\U00016ecd\U00016eb3\U00016ece\U00016eb4\U00016ecf\U00016eb5\U00016ed0\U00016eb6\U00016ed1"
    U"\U00016eb7\U00016ed2\U00016eb8\U00016ed3\U0001e900\U0001e922\U0001e901\U0001e923\U0001e902\U0001e924"
    U"\U0001e903\U0001e925\U0001e904\U0001e926\U0001e905\U0001e927\U0001e906\U0001e928\U0001e907\U0001e929"
    U"\U0001e908\U0001e92a\U0001e909\U0001e92b\U0001e90a\U0001e92c\U0001e90b\U0001e92d\U0001e90c\U0001e92e"
    U"\U0001e90d\U0001e92f\U0001e90e\U0001e930\U0001e90f\U0001e931\U0001e910\U0001e932\U0001e911\U0001e933"
    U"\U0001e912\U0001e934\U0001e913\U0001e935\U0001e914\U0001e936\U0001e915\U0001e937\U0001e916\U0001e938"
    U"\U0001e917\U0001e939\U0001e918\U0001e93a\U0001e919\U0001e93b\U0001e91a\U0001e93c\U0001e91b\U0001e93d"
    U"\U0001e91c\U0001e93e\U0001e91d\U0001e93f\U0001e91e\U0001e940\U0001e91f\U0001e941\U0001e920\U0001e942"
    U"\U0001e921\U0001e943\U0002f800\u4e3d\U0002f801\u4e38\U0002f802\u4e41\U0002f803\U00020122"
    U"\U0002f804\u4f60\U0002f805\u4fae\U0002f806\u4fbb\U0002f807\u5002\U0002f808\u507a\U0002f809\u5099"
    U"\U0002f80a\u50e7\U0002f80b\u50cf\U0002f80c\u349e\U0002f80d\U0002063a\U0002f80e\u514d\U0002f80f\u5154"
    U"\U0002f810\u5164\U0002f811\u5177\U0002f812\U0002051c\U0002f813\u34b9\U0002f814\u5167\U0002f815\u518d"
    U"\U0002f816\U0002054b\U0002f817\u5197\U0002f818\u51a4\U0002f819\u4ecc\U0002f81a\u51ac\U0002f81b\u51b5"
    U"\U0002f81c\U000291df\U0002f81d\u51f5\U0002f81e\u5203\U0002f81f\u34df\U0002f820\u523b\U0002f821\u5246"
    U"\U0002f822\u5272\U0002f823\u5277\U0002f824\u3515\U0002f825\u52c7\U0002f826\u52c9\U0002f827\u52e4"
    U"\U0002f828\u52fa\U0002f829\u5305\U0002f82a\u5306\U0002f82b\u5317\U0002f82c\u5349\U0002f82d\u5351"
    U"\U0002f82e\u535a\U0002f82f\u5373\U0002f830\u537d\U0002f831\u537f\U0002f832\u537f\U0002f833\u537f"
    U"\U0002f834\U00020a2c\U0002f835\u7070\U0002f836\u53ca\U0002f837\u53df\U0002f838\U00020b63"
    U"\U0002f839\u53eb\U0002f83a\u53f1\U0002f83b\u5406\U0002f83c\u549e\U0002f83d\u5438\U0002f83e\u5448"
    U"\U0002f83f\u5468\U0002f840\u54a2\U0002f841\u54f6\U0002f842\u5510\U0002f843\u5553\U0002f844\u5563"
    U"\U0002f845\u5584\U0002f846\u5584\U0002f847\u5599\U0002f848\u55ab\U0002f849\u55b3\U0002f84a\u55c2"
    U"\U0002f84b\u5716\U0002f84c\u5606\U0002f84d\u5717\U0002f84e\u5651\U0002f84f\u5674\U0002f850\u5207"
    U"\U0002f851\u58ee\U0002f852\u57ce\U0002f853\u57f4\U0002f854\u580d\U0002f855\u578b\U0002f856\u5832"
    U"\U0002f857\u5831\U0002f858\u58ac\U0002f859\U000214e4\U0002f85a\u58f2\U0002f85b\u58f7\U0002f85c\u5906"
    U"\U0002f85d\u591a\U0002f85e\u5922\U0002f85f\u5962\U0002f860\U000216a8\U0002f861\U000216ea"
    U"\U0002f862\u59ec\U0002f863\u5a1b\U0002f864\u5a27\U0002f865\u59d8\U0002f866\u5a66\U0002f867\u36ee"
    U"\U0002f868\u36fc\U0002f869\u5b08\U0002f86a\u5b3e\U0002f86b\u5b3e\U0002f86c\U000219c8\U0002f86d\u5bc3"
    U"\U0002f86e\u5bd8\U0002f86f\u5be7\U0002f870\u5bf3\U0002f871\U00021b18\U0002f872\u5bff\U0002f873\u5c06"
    U"\U0002f874\u5f53\U0002f875\u5c22\U0002f876\u3781\U0002f877\u5c60\U0002f878\u5c6e\U0002f879\u5cc0"
    U"\U0002f87a\u5c8d\U0002f87b\U00021de4\U0002f87c\u5d43\U0002f87d\U00021de6\U0002f87e\u5d6e"
    U"\U0002f87f\u5d6b\U0002f880\u5d7c\U0002f881\u5de1\U0002f882\u5de2\U0002f883\u382f\U0002f884\u5dfd"
    U"\U0002f885\u5e28\U0002f886\u5e3d\U0002f887\u5e69\U0002f888\u3862\U0002f889\U00022183\U0002f88a\u387c"
    U"\U0002f88b\u5eb0\U0002f88c\u5eb3\U0002f88d\u5eb6\U0002f88e\u5eca\U0002f88f\U0002a392\U0002f890\u5efe"
    U"\U0002f891\U00022331\U0002f892\U00022331\U0002f893\u8201\U0002f894\u5f22\U0002f895\u5f22"
    U"\U0002f896\u38c7\U0002f897\U000232b8\U0002f898\U000261da\U0002f899\u5f62\U0002f89a\u5f6b"
    U"\U0002f89b\u38e3\U0002f89c\u5f9a\U0002f89d\u5fcd\U0002f89e\u5fd7\U0002f89f\u5ff9\U0002f8a0\u6081"
    U"\U0002f8a1\u393a\U0002f8a2\u391c\U0002f8a3\u6094\U0002f8a4\U000226d4\U0002f8a5\u60c7\U0002f8a6\u6148"
    U"\U0002f8a7\u614c\U0002f8a8\u614e\U0002f8a9\u614c\U0002f8aa\u617a\U0002f8ab\u618e\U0002f8ac\u61b2"
    U"\U0002f8ad\u61a4\U0002f8ae\u61af\U0002f8af\u61de\U0002f8b0\u61f2\U0002f8b1\u61f6\U0002f8b2\u6210"
    U"\U0002f8b3\u621b\U0002f8b4\u625d\U0002f8b5\u62b1\U0002f8b6\u62d4\U0002f8b7\u6350\U0002f8b8\U00022b0c"
    U"\U0002f8b9\u633d\U0002f8ba\u62fc\U0002f8bb\u6368\U0002f8bc\u6383\U0002f8bd\u63e4\U0002f8be\U00022bf1"
    U"\U0002f8bf\u6422\U0002f8c0\u63c5\U0002f8c1\u63a9\U0002f8c2\u3a2e\U0002f8c3\u6469\U0002f8c4\u647e"
    U"\U0002f8c5\u649d\U0002f8c6\u6477\U0002f8c7\u3a6c\U0002f8c8\u654f\U0002f8c9\u656c\U0002f8ca\U0002300a"
    U"\U0002f8cb\u65e3\U0002f8cc\u66f8\U0002f8cd\u6649\U0002f8ce\u3b19\U0002f8cf\u6691\U0002f8d0\u3b08"
    U"\U0002f8d1\u3ae4\U0002f8d2\u5192\U0002f8d3\u5195\U0002f8d4\u6700\U0002f8d5\u669c\U0002f8d6\u80ad"
    U"\U0002f8d7\u43d9\U0002f8d8\u6717\U0002f8d9\u671b\U0002f8da\u6721\U0002f8db\u675e\U0002f8dc\u6753"
    U"\U0002f8dd\U000233c3\U0002f8de\u3b49\U0002f8df\u67fa\U0002f8e0\u6785\U0002f8e1\u6852\U0002f8e2\u6885"
    U"\U0002f8e3\U0002346d\U0002f8e4\u688e\U0002f8e5\u681f\U0002f8e6\u6914\U0002f8e7\u3b9d\U0002f8e8\u6942"
    U"\U0002f8e9\u69a3\U0002f8ea\u69ea\U0002f8eb\u6aa8\U0002f8ec\U000236a3\U0002f8ed\u6adb\U0002f8ee\u3c18"
    U"\U0002f8ef\u6b21\U0002f8f0\U000238a7\U0002f8f1\u6b54\U0002f8f2\u3c4e\U0002f8f3\u6b72\U0002f8f4\u6b9f"
    U"\U0002f8f5\u6bba\U0002f8f6\u6bbb\U0002f8f7\U00023a8d\U0002f8f8\U00021d0b\U0002f8f9\U00023afa"
    U"\U0002f8fa\u6c4e\U0002f8fb\U00023cbc\U0002f8fc\u6cbf\U0002f8fd\u6ccd\U0002f8fe\u6c67\U0002f8ff\u6d16"
    U"\U0002f900\u6d3e\U0002f901\u6d77\U0002f902\u6d41\U0002f903\u6d69\U0002f904\u6d78\U0002f905\u6d85"
    U"\U0002f906\U00023d1e\U0002f907\u6d34\U0002f908\u6e2f\U0002f909\u6e6e\U0002f90a\u3d33\U0002f90b\u6ecb"
    U"\U0002f90c\u6ec7\U0002f90d\U00023ed1\U0002f90e\u6df9\U0002f90f\u6f6e\U0002f910\U00023f5e"
    U"\U0002f911\U00023f8e\U0002f912\u6fc6\U0002f913\u7039\U0002f914\u701e\U0002f915\u701b\U0002f916\u3d96"
    U"\U0002f917\u704a\U0002f918\u707d\U0002f919\u7077\U0002f91a\u70ad\U0002f91b\U00020525\U0002f91c\u7145"
    U"\U0002f91d\U00024263\U0002f91e\u719c\U0002f91f\U000243ab\U0002f920\u7228\U0002f921\u7235"
    U"\U0002f922\u7250\U0002f923\U00024608\U0002f924\u7280\U0002f925\u7295\U0002f926\U00024735"
    U"\U0002f927\U00024814\U0002f928\u737a\U0002f929\u738b\U0002f92a\u3eac\U0002f92b\u73a5\U0002f92c\u3eb8"
    U"\U0002f92d\u3eb8\U0002f92e\u7447\U0002f92f\u745c\U0002f930\u7471\U0002f931\u7485\U0002f932\u74ca"
    U"\U0002f933\u3f1b\U0002f934\u7524\U0002f935\U00024c36\U0002f936\u753e\U0002f937\U00024c92"
    U"\U0002f938\u7570\U0002f939\U0002219f\U0002f93a\u7610\U0002f93b\U00024fa1\U0002f93c\U00024fb8"
    U"\U0002f93d\U00025044\U0002f93e\u3ffc\U0002f93f\u4008\U0002f940\u76f4\U0002f941\U000250f3"
    U"\U0002f942\U000250f2\U0002f943\U00025119\U0002f944\U00025133\U0002f945\u771e\U0002f946\u771f"
    U"\U0002f947\u771f\U0002f948\u774a\U0002f949\u4039\U0002f94a\u778b\U0002f94b\u4046\U0002f94c\u4096"
    U"\U0002f94d\U0002541d\U0002f94e\u784e\U0002f94f\u788c\U0002f950\u78cc\U0002f951\u40e3"
    U"\U0002f952\U00025626\U0002f953\u7956\U0002f954\U0002569a\U0002f955\U000256c5\U0002f956\u798f"
    U"\U0002f957\u79eb\U0002f958\u412f\U0002f959\u7a40\U0002f95a\u7a4a\U0002f95b\u7a4f\U0002f95c\U0002597c"
    U"\U0002f95d\U00025aa7\U0002f95e\U00025aa7\U0002f95f\u7aee\U0002f960\u4202\U0002f961\U00025bab"
    U"\U0002f962\u7bc6\U0002f963\u7bc9\U0002f964\u4227\U0002f965\U00025c80\U0002f966\u7cd2\U0002f967\u42a0"
    U"\U0002f968\u7ce8\U0002f969\u7ce3\U0002f96a\u7d00\U0002f96b\U00025f86\U0002f96c\u7d63\U0002f96d\u4301"
    U"\U0002f96e\u7dc7\U0002f96f\u7e02\U0002f970\u7e45\U0002f971\u4334\U0002f972\U00026228"
    U"\U0002f973\U00026247\U0002f974\u4359\U0002f975\U000262d9\U0002f976\u7f7a\U0002f977\U0002633e"
    U"\U0002f978\u7f95\U0002f979\u7ffa\U0002f97a\u8005\U0002f97b\U000264da\U0002f97c\U00026523"
    U"\U0002f97d\u8060\U0002f97e\U000265a8\U0002f97f\u8070\U0002f980\U0002335f\U0002f981\u43d5"
    U"\U0002f982\u80b2\U0002f983\u8103\U0002f984\u440b\U0002f985\u813e\U0002f986\u5ab5\U0002f987\U000267a7"
    U"\U0002f988\U000267b5\U0002f989\U00023393\U0002f98a\U0002339c\U0002f98b\u8201\U0002f98c\u8204"
    U"\U0002f98d\u8f9e\U0002f98e\u446b\U0002f98f\u8291\U0002f990\u828b\U0002f991\u829d\U0002f992\u52b3"
    U"\U0002f993\u82b1\U0002f994\u82b3\U0002f995\u82bd\U0002f996\u82e6\U0002f997\U00026b3c\U0002f998\u82e5"
    U"\U0002f999\u831d\U0002f99a\u8363\U0002f99b\u83ad\U0002f99c\u8323\U0002f99d\u83bd\U0002f99e\u83e7"
    U"\U0002f99f\u8457\U0002f9a0\u8353\U0002f9a1\u83ca\U0002f9a2\u83cc\U0002f9a3\u83dc\U0002f9a4\U00026c36"
    U"\U0002f9a5\U00026d6b\U0002f9a6\U00026cd5\U0002f9a7\u452b\U0002f9a8\u84f1\U0002f9a9\u84f3"
    U"\U0002f9aa\u8516\U0002f9ab\U000273ca\U0002f9ac\u8564\U0002f9ad\U00026f2c\U0002f9ae\u455d"
    U"\U0002f9af\u4561\U0002f9b0\U00026fb1\U0002f9b1\U000270d2\U0002f9b2\u456b\U0002f9b3\u8650"
    U"\U0002f9b4\u865c\U0002f9b5\u8667\U0002f9b6\u8669\U0002f9b7\u86a9\U0002f9b8\u8688\U0002f9b9\u870e"
    U"\U0002f9ba\u86e2\U0002f9bb\u8779\U0002f9bc\u8728\U0002f9bd\u876b\U0002f9be\u8786\U0002f9bf\u45d7"
    U"\U0002f9c0\u87e1\U0002f9c1\u8801\U0002f9c2\u45f9\U0002f9c3\u8860\U0002f9c4\u8863\U0002f9c5\U00027667"
    U"\U0002f9c6\u88d7\U0002f9c7\u88de\U0002f9c8\u4635\U0002f9c9\u88fa\U0002f9ca\u34bb\U0002f9cb\U000278ae"
    U"\U0002f9cc\U00027966\U0002f9cd\u46be\U0002f9ce\u46c7\U0002f9cf\u8aa0\U0002f9d0\u8aed\U0002f9d1\u8b8a"
    U"\U0002f9d2\u8c55\U0002f9d3\U00027ca8\U0002f9d4\u8cab\U0002f9d5\u8cc1\U0002f9d6\u8d1b\U0002f9d7\u8d77"
    U"\U0002f9d8\U00027f2f\U0002f9d9\U00020804\U0002f9da\u8dcb\U0002f9db\u8dbc\U0002f9dc\u8df0"
    U"\U0002f9dd\U000208de\U0002f9de\u8ed4\U0002f9df\u8f38\U0002f9e0\U000285d2\U0002f9e1\U000285ed"
    U"\U0002f9e2\u9094\U0002f9e3\u90f1\U0002f9e4\u9111\U0002f9e5\U0002872e\U0002f9e6\u911b\U0002f9e7\u9238"
    U"\U0002f9e8\u92d7\U0002f9e9\u92d8\U0002f9ea\u927c\U0002f9eb\u93f9\U0002f9ec\u9415\U0002f9ed\U00028bfa"
    U"\U0002f9ee\u958b\U0002f9ef\u4995\U0002f9f0\u95b7\U0002f9f1\U00028d77\U0002f9f2\u49e6\U0002f9f3\u96c3"
    U"\U0002f9f4\u5db2\U0002f9f5\u9723\U0002f9f6\U00029145\U0002f9f7\U0002921a\U0002f9f8\u4a6e"
    U"\U0002f9f9\u4a76\U0002f9fa\u97e0\U0002f9fb\U0002940a\U0002f9fc\u4ab2\U0002f9fd\U00029496"
    U"\U0002f9fe\u980b\U0002f9ff\u980b\U0002fa00\u9829\U0002fa01\U000295b6\U0002fa02\u98e2\U0002fa03\u4b33"
    U"\U0002fa04\u9929\U0002fa05\u99a7\U0002fa06\u99c2\U0002fa07\u99fe\U0002fa08\u4bce\U0002fa09\U00029b30"
    U"\U0002fa0a\u9b12\U0002fa0b\u9c40\U0002fa0c\u9cfd\U0002fa0d\u4cce\U0002fa0e\u4ced\U0002fa0f\u9d67"
    U"\U0002fa10\U0002a0ce\U0002fa11\u4cf8\U0002fa12\U0002a105\U0002fa13\U0002a20e\U0002fa14\U0002a291"
    U"\U0002fa15\u9ebb\U0002fa16\u4d56\U0002fa17\u9ef9\U0002fa18\u9efe\U0002fa19\u9f05\U0002fa1a\u9f0f"
    U"\U0002fa1b\u9f16\U0002fa1c\u9f3b\U0002fa1d\U0002a600";

// Vowel signs and notes of music, in fours: a character, and the two or three it becomes; \ufffd stands for none.
inline constexpr std::u32string_view split =
    U"\u09cb\u09c7\u09be\ufffd\u09cc\u09c7\u09d7\ufffd\u0b4b\u0b47\u0b3e\ufffd\u0b4c\u0b47\u0b57\ufffd"
    U"ஔஒ\u0bd7\ufffd\u0bca\u0bc6\u0bbe\ufffd\u0bcb\u0bc7\u0bbe\ufffd\u0bcc\u0bc6\u0bd7\ufffd"
    U"\u0ccb\u0cc2\u0cd5\ufffd\u0d4a\u0d46\u0d3e\ufffd\u0d4b\u0d47\u0d3e\ufffd\u0d4c\u0d46\u0d57\ufffd"
    U"\u0ddc\u0dd9\u0dcf\ufffd\u0ddd\u0dd9\u0dcf\ufffd\u0dde\u0dd9\u0ddf\ufffdᬆᬅ\u1b35\ufffdᬈᬇ\u1b35\ufffd"
    U"ᬊᬉ\u1b35\ufffdᬌᬋ\u1b35\ufffdᬎᬍ\u1b35\ufffdᬒᬑ\u1b35\ufffd\u1b40\u1b3e\u1b35\ufffd"
    U"\u1b41\u1b3f\u1b35\ufffd\U0001134b\U00011347\U0001133e\ufffd\U0001134c\U00011347\U00011357\ufffd"
    U"\U000114bc\U000114b9\U000114b0\ufffd\U000114be\U000114b9\U000114bd\ufffd"
    U"\U000115ba\U000115b8\U000115af\ufffd\U000115bb\U000115b9\U000115af\ufffd"
    U"\U0001d15e\U0001d157\U0001d165\ufffd\U0001d15f\U0001d158\U0001d165\ufffd"
    U"\U0001d160\U0001d158\U0001d165\U0001d16e\U0001d161\U0001d158\U0001d165\U0001d16f"
    U"\U0001d162\U0001d158\U0001d165\U0001d170\U0001d163\U0001d158\U0001d165\U0001d171"
    U"\U0001d164\U0001d158\U0001d165\U0001d172\U0001d1bb\U0001d1b9\U0001d165\ufffd"
    U"\U0001d1bc\U0001d1ba\U0001d165\ufffd\U0001d1bd\U0001d1b9\U0001d165\U0001d16e"
    U"\U0001d1be\U0001d1ba\U0001d165\U0001d16e\U0001d1bf\U0001d1b9\U0001d165\U0001d16f"
    U"\U0001d1c0\U0001d1ba\U0001d165\U0001d16f";

// clang-format on

}  // namespace minilm
