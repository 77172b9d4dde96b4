"""The verbs, adjectives and small words of the phrasebook; `lexicon.py` explains the notation.

A verb's last column reads: subject > complements. `acc`, `dat` and `for/auf+acc` open a complement and are followed by
what may fill it; `place` and `company` allow a place or a companion, `that`, `whether` and `to` open a clause,
`adjective` a predicate
from the named list. English `look-for` keeps its second word before the object, `pick_up` lets a pronoun between.
"""

from __future__ import annotations

VERBS = """
sleep slept slept       | schlafen schläft schlief geschlafen     | person animal > place
work                    | arbeiten arbeitet arbeitete gearbeitet  | person > place company manner
laugh                   | lachen lacht lachte gelacht             | person > place company
cry cried cried         | weinen weint weinte geweint             | person > place
sing sang sung          | singen singt sang gesungen              | person > place company manner
dance danced danced     | tanzen tanzt tanzte getanzt             | person > place company manner
swim swam swum          | schwimmen schwimmt schwamm ist geschwommen | person > place company manner
smile smiled smiled     | lächeln lächelt lächelte gelächelt      | person >
travel travelled travelled | reisen reist reiste ist gereist         | person > company
cough                   | husten hustet hustete gehustet          | person > place
snore snored snored     | schnarchen schnarcht schnarchte geschnarcht | person pet > place
bark                    | bellen bellt bellte gebellt             | barker > place
arrive arrived arrived  | an|kommen kommt kam ist angekommen      | person public >
wake_up woke woken      | auf|wachen wacht wachte ist aufgewacht  | person animal > place
disappear               | verschwinden verschwindet verschwand ist verschwunden | person animal >
return                  | zurück|kehren kehrt kehrte ist zurückgekehrt | person > company
stop stopped stopped    | an|halten hält hielt angehalten         | road > place
glow                    | leuchten leuchtet leuchtete geleuchtet  | glowing >
burn                    | brennen brennt brannte gebrannt         | burning building >
bloom                   | blühen blüht blühte geblüht             | blooming > place
ring rang rung          | klingeln klingelt klingelte geklingelt  | ringing >
die died died           | sterben stirbt starb ist gestorben      | person animal > place
fly flew flown          | fliegen fliegt flog ist geflogen        | flier >
begin began begun       | beginnen beginnt begann begonnen        | event >
read read read          | lesen liest las gelesen                 | person > acc text; place manner
write wrote written     | schreiben schreibt schrieb geschrieben  | adult > acc prose; place manner
eat ate eaten           | essen isst aß gegessen                  | person > acc food; place company manner
drink drank drunk       | trinken trinkt trank getrunken          | person > acc drink; place company manner
see saw seen | sehen sieht sah gesehen | person animal > acc person animal building vehicle plant; place
buy bought bought       | kaufen kauft kaufte gekauft             | person > acc goods; company
sell sold sold          | verkaufen verkauft verkaufte verkauft   | adult > acc goods building; place
find found found        | finden findet fand gefunden             | person > acc small text pet; place
lose lost lost          | verlieren verliert verlor verloren      | person > acc small; place
look-for                | suchen sucht suchte gesucht             | person > acc small pet person; place
carry carried carried   | tragen trägt trug getragen              | person > acc portable young; manner
polish              | polieren poliert polierte poliert   | person > acc shoe mirror instrument furniture; place manner
repair                  | reparieren repariert reparierte repariert | adult > acc vehicle device roof; place manner
draw drew drawn         | zeichnen zeichnet zeichnete gezeichnet  | person > acc animal building plant; place manner
open                    | öffnen öffnet öffnete geöffnet          | person > acc opening letter box bottle; manner
close closed closed     | schließen schließt schloss geschlossen  | person > acc opening; manner
wash                    | waschen wäscht wusch gewaschen          | person > acc clothes fruit road; manner
love loved loved        | lieben liebt liebte geliebt             | person > acc person pet tongue town
hate hated hated        | hassen hasst hasste gehasst             | person > acc person weather town
know knew known         | kennen kennt kannte gekannt             | person > acc person town song tale
visit                   | besuchen besucht besuchte besucht       | person > acc kin town building; company
meet met met            | treffen trifft traf getroffen           | person > acc person; place
invite invited invited  | ein|laden lädt lud eingeladen           | adult > acc person
call                    | an|rufen ruft rief angerufen            | adult > acc person
pick_up                 | ab|holen holt holte abgeholt            | adult > acc person portable; manner
bring_along brought brought | mit|bringen bringt brachte mitgebracht  | person > acc portable pet food drink
throw_away threw thrown | weg|werfen wirft warf weggeworfen       | person > acc small food
switch_off              | aus|schalten schaltet schaltete ausgeschaltet | person > acc device; manner
put_on put put          | an|ziehen zieht zog angezogen           | person > acc clothes; manner
tidy_up tidied tidied   | auf|räumen räumt räumte aufgeräumt      | person > acc room; manner
understand understood understood | verstehen versteht verstand verstanden  | person > acc puzzle person text
forget forgot forgotten | vergessen vergisst vergaß vergessen     | person > acc portable thought; to
use used used           | benutzen benutzt benutzte benutzt       | person > acc device vehicle
build built built       | bauen baut baute gebaut                 | adult > acc building ship bridge; company
cut cut cut             | schneiden schneidet schnitt geschnitten | person > acc fruit blooming; manner
cook                    | kochen kocht kochte gekocht             | person > acc cooked; place company manner
bake baked baked        | backen backt backte gebacken            | adult > acc baked; company manner
feed fed fed            | füttern füttert fütterte gefüttert      | person > acc animal; place manner
catch caught caught     | fangen fängt fing gefangen              | person > acc animal toy
hunt                    | jagen jagt jagte gejagt                 | wild > acc mouse rabbit duck chicken frog bird goat
kiss                    | küssen küsst küsste geküsst             | person > acc person; place
hug hugged hugged       | umarmen umarmt umarmte umarmt           | person > acc person
hide hid hidden         | verstecken versteckt versteckte versteckt | person > acc small text; manner
steal stole stolen      | stehlen stiehlt stahl gestohlen         | adult > acc small goods
photograph              | fotografieren fotografiert fotografierte fotografiert | person > acc person animal building
describe described described | beschreiben beschreibt beschrieb beschrieben | person > acc person thing building thought
play                    | spielen spielt spielte gespielt         | person > acc instrument; place
learn                   | lernen lernt lernte gelernt             | person > acc tongue; place company
need                    | brauchen braucht brauchte gebraucht     | person > acc small vehicle kin
greet                   | grüßen grüßt grüßte gegrüßt             | person > acc person
watch                   | beobachten beobachtet beobachtete beobachtet | person animal > acc person animal; place
rescue rescued rescued  | retten rettet rettete gerettet          | person > acc person animal
admire admired admired  | bewundern bewundert bewunderte bewundert | person > acc person building picture blooming
leave left left         | verlassen verlässt verließ verlassen    | person > acc building town room
ride rode ridden        | reiten reitet ritt ist geritten         | person > company
help                    | helfen hilft half geholfen              | person > dat person animal; place
thank                   | danken dankt dankte gedankt             | person > dat person
follow                  | folgen folgt folgte ist gefolgt         | person animal > dat person animal
trust                   | vertrauen vertraut vertraute vertraut   | person > dat person
congratulate congratulated congratulated | gratulieren gratuliert gratulierte gratuliert | person > dat person
forgive forgave forgiven | verzeihen verzeiht verzieh verziehen    | person > dat person
listen-to               | zu|hören hört hörte zugehört            | person > dat person
belong-to               | gehören gehört gehörte gehört           | goods small pet building > dat adult
give gave given         | geben gibt gab gegeben                  | person > dat person; acc portable food text
show showed shown       | zeigen zeigt zeigte gezeigt             | person > dat person; acc thing text building
send sent sent          | schicken schickt schickte geschickt     | adult > dat person; acc portable text
lend lent lent          | leihen leiht lieh geliehen              | person > dat person; acc portable vehicle
offer                   | an|bieten bietet bot angeboten          | adult > dat person; acc food drink
tell told told          | erzählen erzählt erzählte erzählt       | person > dat person; acc tale
promise promised promised | versprechen verspricht versprach versprochen | adult > dat person; acc toy gift; to
wait                    | warten wartet wartete gewartet          | person > for/auf+acc person public; place manner
think thought thought   | denken denkt dachte gedacht             | person > of/an+acc person event
talk                    | sprechen spricht sprach gesprochen      | person > about/über+acc person event idea; company
dream                   | träumen träumt träumte geträumt         | person > of/von+dat person event food; place
fight fought fought     | kämpfen kämpft kämpfte gekämpft         | person > against/gegen+acc wild adult
go went gone            | gehen geht ging ist gegangen            | person > to/zu+dat building kin; company
drive drove driven      | fahren fährt fuhr ist gefahren          | adult > to/zu+dat building kin; company
run ran run             | laufen läuft lief ist gelaufen          | person animal > through/durch+acc open town building
live lived lived        | wohnen wohnt wohnte gewohnt             | person > in/in+dat house town hotel; company
sit sat sat             | sitzen sitzt saß gesessen               | person pet > on/auf+dat seat; company
lie lay lain            | liegen liegt lag gelegen                | small text pet > on/auf+dat furniture
stand stood stood   | stehen steht stand gestanden        | furniture person vehicle > in_front_of/vor+dat building
say said said           | sagen sagt sagte gesagt                 | person > that
believe believed believed | glauben glaubt glaubte geglaubt         | person > that
hope hoped hoped        | hoffen hofft hoffte gehofft             | person > that; to
claim                   | behaupten behauptet behauptete behauptet | adult > that
check                   | prüfen prüft prüfte geprüft             | person > whether
try tried tried         | versuchen versucht versuchte versucht   | person > to
decide decided decided  | beschließen beschließt beschloss beschlossen | adult > to
remain                  | bleiben bleibt blieb ist geblieben      | person building room drink > adjective lasting
taste tasted tasted     | schmecken schmeckt schmeckte geschmeckt | food drink > adjective tasted
"""

ADJECTIVES = """
old older               | alt älter              | person animal thing building vehicle text plant town
young younger           | jung jünger            | person animal
new newer               | neu neuer              | thing building vehicle text thought
big bigger              | groß größer            | bridge animal thing building room vehicle plant town food puzzle open
small smaller           | klein kleiner          | person animal thing building room vehicle plant town food open
beautiful               | schön schöner          | woman girl queen animal thing building plant town song open text
ugly uglier             | hässlich hässlicher    | animal thing building town
clever cleverer         | klug klüger            | person animal plan idea
stupid                  | dumm dümmer            | question plan idea
tired                   | müde müder             | person animal
hungry hungrier          | hungrig hungriger     | person animal
happy happier           | glücklich glücklicher  | person
sad sadder              | traurig trauriger      | person song text tale
angry angrier angrily   | wütend wütender        | person wild
friendly friendlier     | freundlich freundlicher | person pet
polite                  | höflich höflicher      | person
famous                  | berühmt berühmter      | adult building song text town
rich richer             | reich reicher          | adult town
poor poorer             | arm ärmer              | person
sick sicker             | krank kränker          | person animal
healthy healthier       | gesund gesünder        | person animal food
strong stronger         | stark stärker          | person animal storm coffee tea
weak weaker             | schwach schwächer      | person animal
brave braver            | mutig mutiger          | person
lazy lazier             | faul fauler            | person animal
calm calmer calmly      | ruhig ruhiger          | person animal open
nervous nervously       | nervös nervöser        | person
proud prouder proudly   | stolz stolzer          | person
patient patiently       | geduldig geduldiger    | person
careful carefully       | vorsichtig vorsichtiger | person
strange stranger        | seltsam seltsamer      | person animal thing idea text building
expensive               | teuer teurer teur-     | goods building
cheap cheaper           | billig billiger        | goods
heavy heavier           | schwer schwerer        | thing
light lighter           | leicht leichter        | small
red redder              | rot roter              | clothes furniture vehicle bag blooming apple
blue bluer              | blau blauer            | clothes furniture vehicle bag
green greener           | grün grüner            | clothes furniture vehicle bag frog
yellow yellower         | gelb gelber            | clothes furniture vehicle bag blooming
white whiter            | weiß weißer            | clothes furniture vehicle bag pet mount cow goat chicken
black blacker           | schwarz schwärzer      | clothes furniture vehicle bag pet mount cow goat chicken
brown browner           | braun brauner          | clothes furniture vehicle bag pet mount cow goat chicken
clean cleaner           | sauber sauberer        | thing room building
dirty dirtier           | schmutzig schmutziger  | thing room vehicle building
broken                  | kaputt kaputter        | device vehicle fragile toy
empty emptier           | leer leerer            | room bottle cup glass
round rounder           | rund runder            | furniture fragile
hot hotter              | heiß heißer            | cooked drink
cold colder             | kalt kälter            | drink cooked room
fresh fresher           | frisch frischer        | food drink
sweet sweeter           | süß süßer              | fruit baked drink
sour sourer             | sauer saurer saur-     | fruit
ripe riper              | reif reifer            | fruit
delicious               | lecker leckerer        | food
dark darker             | dunkel dunkler dunkl-  | room building open
bright brighter         | hell heller            | room glowing
long longer             | lang länger            | text event street bridge
short shorter           | kurz kürzer            | text event
wide wider              | breit breiter          | street bridge river
quick quicker quickly   | schnell schneller      | vehicle animal
slow slower slowly      | langsam langsamer      | vehicle animal
loud louder             | laut lauter            | machine radio tractor song
quiet quieter quietly   | leise leiser           | machine radio computer song
modern                  | modern moderner        | building device vehicle town bridge
dangerous               | gefährlich gefährlicher | wild thought storm
interesting             | interessant interessanter | text idea
boring                  | langweilig langweiliger | text film concert lecture meeting
difficult               | schwierig schwieriger  | puzzle exam text
important               | wichtig wichtiger      | text puzzle thought event
funny funnier           | lustig lustiger        | person text show
high higher             | hoch höher hoh-        | peak bridge building
deep deeper             | tief tiefer            | lake river
dry drier               | trocken trockener      | clothes bread
wet wetter              | nass nasser            | clothes animal
comfortable             | bequem bequemer        | seat clothes
simple simpler          | einfach einfacher      | puzzle thought
"""

COLOURS = "red blue green yellow white black brown"

# Tense -> when. A phrase of two words is aligned word by word.
TIMES = {
    "present": "today/heute now/jetzt on_Monday/am_Montag on_Friday/am_Freitag every_day/jeden_Tag in_summer/im_Sommer"
    " in_winter/im_Winter",
    "past": "yesterday/gestern on_Monday/am_Montag on_Friday/am_Freitag last_week/letzte_Woche last_year/letztes_Jahr"
    " in_summer/im_Sommer in_winter/im_Winter",
    "perfect": "today/heute",
    "future": "tomorrow/morgen soon/bald on_Monday/am_Montag on_Friday/am_Freitag next_week/nächste_Woche"
    " next_year/nächstes_Jahr in_summer/im_Sommer in_winter/im_Winter",
}
OFTEN = "often/oft always/immer never/nie sometimes/manchmal seldom/selten usually/meistens"
OPINIONS = "perhaps/vielleicht probably/wahrscheinlich unfortunately/leider of_course/natürlich"
DEGREES = "very/sehr quite/ziemlich"

PREDICATES = {
    "lasting": "calm friendly patient polite sad healthy empty dark dirty cold",
    "tasted": "delicious sweet sour fresh strange",
}

# Adjectives for a state that passes: only these go with "today" and "often".
PASSING = """
tired hungry happy sad angry sick healthy calm nervous proud patient careful clean dirty broken empty hot cold dry wet
loud quiet bright dark friendly polite lazy
"""

# Opposites, which do not meet in one sentence.
OPPOSITES = """
big/small old/young old/new beautiful/ugly clever/stupid happy/sad rich/poor sick/healthy strong/weak calm/nervous
expensive/cheap heavy/light clean/dirty hot/cold sweet/sour dark/bright long/short quick/slow loud/quiet
interesting/boring difficult/simple dry/wet brave/nervous calm/angry friendly/angry happy/angry old/modern
"""

# Verbs that nobody tries or promises to do.
STATES = (
    "know need love hate trust understand die disappear live lose cough snore dream admire cry forget remain see burn"
)

# What someone may be known by: the man with ...
CARRIED = "pet bag suitcase umbrella basket hat coat guitar violin camera flute newspaper letter"
